"""Times decoding by the embedded teacher and by its students, and counts their caches.

python experiments/speed/time_decoding.py [--lengths 1024 2048]

One sequence, float32, two threads. Caches are filled with random keys, values and states of the
right shapes: what they hold does not change the time.
"""

from __future__ import annotations

import copy
import os
from typing import Any

# As `run.py` does, before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from measuring import configuration, load_embedded, median_seconds, parse_arguments, show, write
from transformers import DynamicCache, PreTrainedModel

from tc.init import form_of, fresh_mixer
from tc.policy import converted_layers
from tc.student.cache import RecurrentLayer, recurrent_layer
from tc.student.hybrid import build_student
from tc.student.mixer import GatedDeltaNet

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
WARM_UP, NUM_TOKENS = 2, 16


class Decoder:
    """Decodes greedily from a context that was never read.

    Args:
        model: teacher or student.
        context: its length in tokens.
    """

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        self.model, self.cache = model, filled_cache(model, context)
        self.ids = torch.zeros(1, 1, dtype=torch.long)

    @torch.no_grad()
    def step(self) -> None:
        """One token."""
        logits = self.model(self.ids, cache=self.cache, use_cache=True).logits
        self.ids = logits[:, -1:].argmax(-1)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all tensors in the cache."""
        return sum(x.numel() * x.element_size() for x in cached_tensors(self.cache))


def filled_cache(model: PreTrainedModel, context: int) -> DynamicCache:
    """A cache as it is after `context` tokens, but for its contents."""
    config, cache = model.config, DynamicCache(config=model.config)
    for i, layer in enumerate(model.model.layers):
        mixer = layer.self_attn
        if isinstance(mixer, GatedDeltaNet):
            state = torch.randn(1, mixer.num_heads, mixer.head_dim, mixer.head_dim)
            recurrent_layer(cache, i).store(state, context)
        else:
            shape = (1, config.num_key_value_heads, context, config.head_dim)
            cache.update(torch.randn(shape), torch.randn(shape), i)
    return cache


def cached_tensors(cache: DynamicCache) -> list[torch.Tensor]:
    """States, or keys and values, of all layers."""
    tensors = []
    for layer in cache.layers:
        kept = [layer.state] if isinstance(layer, RecurrentLayer) else [layer.keys, layer.values]
        tensors += kept
    return tensors


def make_models() -> dict[str, PreTrainedModel]:
    """The teacher and two students that copy its projections; kept weights are shared."""
    config, teacher = load_embedded()
    models = {"teacher": teacher.model}
    attention = [layer.self_attn for layer in teacher.model.model.layers]
    form = form_of(attention[0], config.student, config.trainer.backend.value)
    for policy in ("every4", "none"):
        layers = converted_layers(configuration(f"policy={policy}").policy, len(attention))
        mixers = {i: fresh_mixer(copy.deepcopy(attention[i]), i, form, config.seed) for i in layers}
        models[policy] = build_student(teacher.model, mixers, {})
    return models


def measure(models: dict[str, PreTrainedModel], context: int) -> list[dict[str, Any]]:
    """A row for each model at one context; they decode in turns."""
    decoders = {name: Decoder(model, context) for name, model in models.items()}
    sizes = {name: decoder.cache_bytes for name, decoder in decoders.items()}
    calls = {name: decoder.step for name, decoder in decoders.items()}
    took = median_seconds(calls, NUM_TOKENS, WARM_UP)
    lengths = {decoder.cache.get_seq_length() for decoder in decoders.values()}
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
