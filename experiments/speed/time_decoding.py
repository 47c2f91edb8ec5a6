"""Times decoding by the embedded teacher and by its students, and counts their caches.

python experiments/speed/time_decoding.py [--lengths 1024 2048]

One sequence, float32, two threads. Caches are filled with random keys, values and states of the
right shapes: what they hold does not change the time.
"""

from __future__ import annotations

import os
from typing import Any

# As `run.py` does, before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from measuring import configuration, copied_mixers, load_embedded, parse_arguments, show, write
from transformers import PreTrainedModel

from tc.evaluate.generation import Decoder, cache_bytes, filled_cache
from tc.meter import median_seconds
from tc.student.hybrid import build_student

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
WARM_UP, NUM_TOKENS = 2, 16


def make_models() -> dict[str, PreTrainedModel]:
    """The teacher and two students that copy its projections; kept weights are shared."""
    config, teacher = load_embedded()
    models = {"teacher": teacher.model}
    for policy in ("every4", "none"):
        mixers = copied_mixers(config, teacher, configuration(f"policy={policy}").policy)
        models[policy] = build_student(teacher.model, mixers, {})
    return models


def measure(models: dict[str, PreTrainedModel], context: int) -> list[dict[str, Any]]:
    """A row for each model at one context; they decode in turns."""
    caches = {name: filled_cache(model, context) for name, model in models.items()}
    sizes = {name: cache_bytes(cache) for name, cache in caches.items()}
    decoders = {name: Decoder(model, caches[name]) for name, model in models.items()}
    calls = {name: decoder.step for name, decoder in decoders.items()}
    took = median_seconds(calls, NUM_TOKENS, WARM_UP)
    lengths = {cache.get_seq_length() for cache in caches.values()}
    assert lengths == {context + WARM_UP + NUM_TOKENS}, lengths
    return [
        {
            "context": context,
            "model": name,
            "tokens_per_s": 1 / took[name],
            "times_teacher": took["teacher"] / took[name],
            "cache_bytes": sizes[name],
        }
        for name in models
    ]


def main() -> None:
    """Measures and writes all rows."""
    torch.set_num_threads(2)
    arguments = parse_arguments(__doc__, LENGTHS)
    models = make_models()
    rows = [show(row) for context in arguments.lengths for row in measure(models, context)]
    write(arguments.output, rows)


if __name__ == "__main__":
    main()
