"""What generation costs: reading a context, writing after it, the cache; one sequence at a time.

Models that are compared take turns, step by step, so that a busy moment of the machine meets all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from tc.config import GenerationConfig
from tc.evaluate.results import Result, Results, warn_beyond
from tc.meter import median_seconds
from tc.student.cache import RecurrentLayer, recurrent_layer
from tc.student.mixer import GatedDeltaNet

TASK = "one_sequence"


def run_generation(
    models: Mapping[str, PreTrainedModel],
    cfg: GenerationConfig,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Results:
    """Times models against each other.

    Args:
        models: causal LMs in evaluation mode, by name.
        cfg: how long, and how often.
        seed: of the context's tokens.
        progress: told how many contexts have been done, and how many there are.

    Returns:
        For each model and context length `prefill_tokens_per_second` and
        `decode_tokens_per_second`, of median times, and `cache_bytes` behind the context.
    """
    results: Results = {name: [] for name in models}
    for done, context in enumerate(cfg.contexts):
        for name, model in models.items():
            warn_beyond(model, f"generation of {name}", context + cfg.warm_up + cfg.tokens)
        for name, found in _of_context(models, context, cfg, seed).items():
            results[name] += found
        progress(done + 1, len(cfg.contexts))
    return results


def _of_context(
    models: Mapping[str, PreTrainedModel], context: int, cfg: GenerationConfig, seed: int
) -> Results:
    """All models at one context length."""
    readers = {name: Reader(model, context, seed) for name, model in models.items()}
    reading = median_seconds(_calls(readers), cfg.repeats, cfg.warm_up)
    sizes = {name: cache_bytes(reader.cache) for name, reader in readers.items()}
    writers = {name: Decoder(model, readers[name].cache) for name, model in models.items()}
    writing = median_seconds(_calls(writers), cfg.tokens, cfg.warm_up)
    values = {
        name: {
            "prefill_tokens_per_second": (context / reading[name], cfg.repeats),
            "decode_tokens_per_second": (1 / writing[name], cfg.tokens),
            "cache_bytes": (float(sizes[name]), None),
        }
        for name in models
    }
    return {
        name: [
            Result("generation", TASK, metric, value, samples=samples, context=context)
            for metric, (value, samples) in metrics.items()
        ]
        for name, metrics in values.items()
    }


def _calls(steppers: Mapping[str, Reader | Decoder]) -> dict[str, Callable[[], None]]:
    return {name: stepper.step for name, stepper in steppers.items()}


class Reader:
    """Reads one context, again and again.

    Args:
        model: a causal LM in evaluation mode.
        context: its length in tokens.
        seed: of the tokens.

    Attributes:
        cache: as the last reading left it.
    """

    def __init__(self, model: PreTrainedModel, context: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, model.config.vocab_size, (1, context), generator=draw)
        self.model, self.ids = model, ids.to(model.device)
        self.cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def step(self) -> None:
        """All of the context, into a fresh cache."""
        self.cache = DynamicCache(config=self.model.config)
        self.model(self.ids, cache=self.cache, use_cache=True, logits_to_keep=1)
        _wait(self.model)


class Decoder:
    """Decodes greedily, a token a step.

    Args:
        model: a causal LM in evaluation mode.
        cache: what the tokens come after.
    """

    def __init__(self, model: PreTrainedModel, cache: DynamicCache) -> None:
        self.model, self.cache = model, cache
        self.ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)

    @torch.no_grad()
    def step(self) -> None:
        """One token."""
        logits = self.model(self.ids, cache=self.cache, use_cache=True).logits
        self.ids = logits[:, -1:].argmax(-1)
        _wait(self.model)


def _wait(model: PreTrainedModel) -> None:
    """Until the model's device has done all that it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def filled_cache(model: PreTrainedModel, context: int) -> DynamicCache:
    """A cache as it is after `context` tokens, but for its contents, which are random."""
    config, cache = model.config, DynamicCache(config=model.config)
    options = {"dtype": model.dtype, "device": model.device}
    for i, layer in enumerate(model.model.layers):
        mixer = layer.self_attn
        if isinstance(mixer, GatedDeltaNet):
            # States are float32 whatever the weights are.
            shape = (1, mixer.num_heads, mixer.head_dim, mixer.head_dim)
            recurrent_layer(cache, i).store(torch.randn(shape, device=model.device), context)
        else:
            shape = (1, config.num_key_value_heads, context, mixer.head_dim)
            cache.update(torch.randn(shape, **options), torch.randn(shape, **options), i)
    return cache


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of all states, keys and values that a cache holds."""
    tensors: list[Any] = []
    for layer in cache.layers:
        kept = [layer.state] if isinstance(layer, RecurrentLayer) else [layer.keys, layer.values]
        tensors += kept
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
