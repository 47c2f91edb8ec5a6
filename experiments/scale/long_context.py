"""What an evaluation at 4,096 and 16,384 tokens takes of memory, for a teacher and its students.

    python experiments/scale/long_context.py [--teacher tiny_llama] [--output FILE.json]

One window of random tokens through `perplexity`, each case in a process of its own: how far
resident memory rises while it runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "speed"))

import torch
from measuring import configuration, copied_mixers, extra_bytes, extra_bytes_alone, show

from tc.artifacts import write_json
from tc.data import Window
from tc.evaluate.perplexity import perplexity
from tc.student.hybrid import build_student
from tc.teacher import load_teacher

CONTEXTS = (4096, 16384)
POLICIES = ("all", "every4", "none")


def alone(teacher: str, policy: str, context: int) -> int:
    """Bytes that one case takes, in this process."""
    torch.set_num_threads(1)
    config = configuration(f"teacher={teacher}", f"policy={policy}")
    loaded = load_teacher(config.teacher, Path(config.paths.cache_dir).expanduser())
    model = loaded.model
    if policy != "all":
        model = build_student(model, copied_mixers(config, loaded, config.policy), {})
    ids = torch.randint(0, model.config.vocab_size, (context,))
    windows = [Window(ids, torch.arange(context) > 0)]
    perplexity(model, [Window(ids[:64], windows[0].counted[:64])], 1)  # what is made once
    return extra_bytes(lambda: perplexity(model, windows, 1))


def main() -> None:
    """Measures and writes all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", default="tiny_llama")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--alone", nargs=3, help="one case in this process; used by the script")
    given = parser.parse_args()
    if given.alone:
        teacher, policy, context = given.alone
        print(alone(teacher, policy, int(context)))
        return
    rows = []
    for policy in POLICIES:
        for context in CONTEXTS:
            taken = extra_bytes_alone(given.teacher, policy, context)
            rows.append(show({"policy": policy, "context": context, "extra_bytes": taken}))
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(given.output, rows)


if __name__ == "__main__":
    main()
