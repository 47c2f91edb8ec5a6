"""The residual stream of packed sequences, carried through a model a few layers at a time.

Shape letters: N sequences, B batch, T tokens, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

BATCH = 4
"""Sequences that go through a layer at once."""


class _Stop(Exception):
    """Raised where the first layer would begin."""


@torch.no_grad()
def layer_inputs(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """What the model hands to its first layer.

    Args:
        model: a supported causal LM.
        input_ids: `[B, T]`, on any device.
        position_ids: `[B, T]`, 0 where a packed document begins.

    Returns:
        The embeddings `[B, T, D]`, and the mask, positions and rotary tables that every layer gets.
    """
    seen: list[tuple[torch.Tensor, dict[str, Any]]] = []

    def stop(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.append((args[0], kwargs))
        raise _Stop

    handle = model.model.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model.model(
            input_ids=input_ids.to(model.device),
            position_ids=position_ids.to(model.device),
            use_cache=False,
        )
    except _Stop:
        return seen[0]
    finally:
        handle.remove()
    raise AssertionError("a model without layers")


class Stream:
    """The residual stream of a part's tokens, in float32 on the CPU.

    Args:
        model: whose embeddings begin it, and whose masks and rotary tables its layers are given.
        input_ids: `[N, T]`.
        position_ids: `[N, T]`.

    Attributes:
        hidden: `[N, T, D]`, what the next layer reads.
    """

    def __init__(
        self, model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> None:
        self.model, self.input_ids, self.position_ids = model, input_ids, position_ids
        self.hidden = torch.cat([self._begin(rows) for rows in self.batches()])

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_tokens(self) -> int:
        """N * T."""
        return self.input_ids.numel()

    def run(self, layers: Iterable[Any], rows: slice | torch.Tensor) -> torch.Tensor:
        """The stream of some sequences behind some layers, `[B, T, D]` float32, on their device."""
        _, around = layer_inputs(self.model, self.input_ids[rows], self.position_ids[rows])
        hidden = self.hidden[rows].to(self.model.device)
        for layer in layers:
            dtype = layer.input_layernorm.weight.dtype  # a mixer has parameters in another one
            hidden = layer(hidden.to(dtype), **_cast(around, dtype))
        return hidden.float()

    @torch.no_grad()
    def advance(self, layers: list[nn.Module]) -> None:
        """Carries the whole stream through some layers, in place."""
        for rows in self.batches():
            self.hidden[rows] = self.run(layers, rows).cpu()

    def batches(self) -> Iterator[slice]:
        """The sequences, so many at a time as go through a layer at once."""
        for start in range(0, len(self), BATCH):
            yield slice(start, start + BATCH)

    def _begin(self, rows: slice) -> torch.Tensor:
        hidden, _ = layer_inputs(self.model, self.input_ids[rows], self.position_ids[rows])
        return hidden.float().cpu()


def _cast(around: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Rotary tables and additive masks in a layer's own type."""

    def cast(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(cast(item) for item in value)
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return {name: cast(value) for name, value in around.items()}
