"""Times the embedded teacher's forward pass: plain, with attention statistics, and eager.

python experiments/speed/time_statistics.py [--lengths 512 1024]

Letters: T tokens. One sequence, float32, two threads, no logits.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

# As `run.py` does, before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from measuring import (
    extra_bytes,
    extra_bytes_alone,
    load_embedded,
    parse_arguments,
    show,
    write,
)
from transformers import PreTrainedModel

from tc.data.speeches import read_speeches
from tc.meter import median_seconds
from tc.stats import AttentionStatistics
from tc.teacher import Teacher
from tc.teacher.capture import capture

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LONGEST_EAGER = 2048
LONGEST_REPEATED = 4096
"""Beyond, a case is timed once."""


class Gatherer:
    """Observes attention alone, for its statistics."""

    def __init__(self, statistics: AttentionStatistics) -> None:
        self.on_attention = statistics.add

    def on_input(self, layer: int, hidden_states: torch.Tensor) -> None:
        """Leaves inputs alone."""

    def on_context(self, layer: int, context: torch.Tensor) -> None:
        """Leaves contexts alone."""

    def on_final(self, hidden_states: torch.Tensor) -> None:
        """Leaves it alone."""


def run_plain(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """The forward pass with SDPA."""
    model.model(input_ids=ids, use_cache=False)


def run_statistics(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """The same, captured, with nothing but the statistics."""
    config = model.config
    statistics = AttentionStatistics(config.num_hidden_layers, config.num_attention_heads)
    capture(model, ids, Gatherer(statistics))
    assert statistics.means()


def run_eager(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """The forward pass that returns every layer's attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    seen = model.model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    model.set_attn_implementation(before)
    assert len(seen) == model.config.num_hidden_layers and seen[0].shape[-1] == ids.shape[1]


WAYS = {"plain": run_plain, "statistics": run_statistics, "eager": run_eager}


def ways(T: int) -> list[str]:
    """What is run at a length."""
    return [name for name in WAYS if name != "eager" or T <= LONGEST_EAGER]


def token_ids(teacher: Teacher, T: int) -> torch.Tensor:
    """The first tokens of the speeches, `[1, T]`."""
    text = ""
    for document in read_speeches():
        text += document.text
        if len(text) > 10 * T:
            break
    ids = teacher.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    assert len(ids) >= T
    return torch.tensor([ids[:T]])


@torch.no_grad()
def measure(teacher: Teacher, T: int) -> dict[str, Any]:
    """A row: one length."""
    config, ids = teacher.model.config, token_ids(teacher, T)
    repeats = max(3, 8192 // T) if T <= LONGEST_REPEATED else 1
    calls = {name: partial(WAYS[name], teacher.model, ids) for name in ways(T)}
    took = median_seconds(calls, repeats, warm_up=int(repeats > 1))
    memory = {name: extra_bytes_alone(name, T) for name in ways(T)}
    attentions = config.num_hidden_layers * config.num_attention_heads * T**2 * 4
    added = memory["statistics"] - memory["plain"]
    return {
        "tokens": T,
        "repeats": repeats,
        **{f"{name}_s": took.get(name) for name in WAYS},
        "statistics_over_plain": took["statistics"] / took["plain"],
        "statistics_over_eager": took["statistics"] / took["eager"] if "eager" in took else None,
        **{f"{name}_extra_bytes": memory.get(name) for name in WAYS},
        "attentions_bytes": attentions,
        "statistics_share_of_attentions": added / attentions,
    }


@torch.no_grad()
def measure_memory(teacher: Teacher, name: str, T: int) -> int:
    """What one pass needs beyond weights and libraries, which are in memory before."""
    ids = token_ids(teacher, T)
    WAYS[name](teacher.model, ids[:, :64])
    for parameter in teacher.model.parameters():
        parameter.sum()  # reads what the file holds
    return extra_bytes(partial(WAYS[name], teacher.model, ids))


def main() -> None:
    """Measures and writes all rows."""
    torch.set_num_threads(2)
    arguments = parse_arguments(__doc__, LENGTHS)
    _, teacher = load_embedded()
    if arguments.alone:
        name, T = arguments.alone
        print(measure_memory(teacher, name, int(T)))
        return
    rows = [show(measure(teacher, T)) for T in arguments.lengths]
    write(arguments.output, rows)


if __name__ == "__main__":
    main()
