"""A model layer by layer, with what its layers hand on at hand.

Shape letters: N sequences, B batch, T tokens, D model dim.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from tc.data import Packed
from tc.teacher.stream import Stream


class Trunk:
    """The layers of a model, and the stream of some tokens in front of each.

    A model that differs in layer i alone then costs only layer i and those behind it.

    Args:
        model: whose embeddings, final norm and rotary tables these are.
        layers: decoder layers, one for each of the model's; each runs in its own dtype.
        tokens: `[N, T]`.
    """

    def __init__(self, model: PreTrainedModel, layers: list[nn.Module], tokens: Packed) -> None:
        self.model, self.layers = model, list(layers)
        self.stream = Stream(model, tokens.input_ids, tokens.position_ids)
        self._inputs = [self.stream.hidden]

    def put(self, index: int, layer: nn.Module) -> None:
        """Replaces a layer for good."""
        self.layers[index] = layer
        del self._inputs[index + 1 :]

    @torch.no_grad()
    def finals(
        self, index: int | None = None, layer: nn.Module | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """What the head reads, with one layer replaced for this once.

        Args:
            index: of the layer that is replaced; None replaces none.
            layer: what takes its place.

        Yields:
            The sequences of each batch, and `[B T, D]` in the model's dtype.
        """
        first = len(self.layers) if index is None else index
        self._reach(first)
        behind = [] if layer is None else [layer, *self.layers[first + 1 :]]
        self.stream.hidden = self._inputs[first]
        for rows in self.stream.batches():
            hidden = self.stream.run(behind, rows).to(self.model.dtype)
            yield rows, self.model.model.norm(hidden).flatten(0, 1)

    def _reach(self, index: int) -> None:
        """Carries the stream on from where it is known."""
        for layer in self.layers[len(self._inputs) - 1 : index]:
            self.stream.hidden = self._inputs[-1].clone()
            self.stream.advance([layer])
            self._inputs.append(self.stream.hidden)


class Bypassed(nn.Module):
    """In the place of an attention module: nothing is added to the residual stream."""

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        """Zeros, and None where an attention module gives its weights."""
        return torch.zeros_like(hidden_states), None


def with_attention(layer: nn.Module, attention: nn.Module) -> nn.Module:
    """A decoder layer with another module for its attention; the rest is the same memory."""
    shared = {id(x): x for x in (*layer.parameters(), *layer.buffers())}
    fresh = copy.deepcopy(layer, shared)
    fresh.self_attn = attention
    return fresh
