"""What a teacher's attention layers see and say, streamed out of one forward pass.

Shape letters: B batch, T tokens, H query heads, J key/value heads, K key dim, V value dim, D model
dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

NAME = "tc_capture"


class Observer(Protocol):
    """What a capture reports to, layer by layer, while a batch goes through the teacher."""

    def on_input(self, layer: int, hidden_states: torch.Tensor) -> None:
        """The attention module's input x, `[B, T, D]`."""

    def on_attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
    ) -> None:
        """Rotated queries `[B, H, T, K]` and keys `[B, J, T, K]`.

        The mask is bool `[B, 1, T, T]`, or None for plainly causal.
        """

    def on_context(self, layer: int, context: torch.Tensor) -> None:
        """The heads' weighted values, which o_proj reads, `[B, T, H V]`."""

    def on_final(self, hidden_states: torch.Tensor) -> None:
        """What the final norm says, which the head reads, `[B, T, D]`."""


@torch.no_grad()
def capture(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    observer: Observer,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> None:
    """Runs the teacher's layers over a batch (no logits) and reports every layer to `observer`.

    Args:
        model: a supported causal LM; its attention implementation is put back afterwards.
        input_ids: `[B, T]`.
        observer: receives what the layers see and say.
        position_ids: `[B, T]`, restarting at 0 where a packed document begins.
        attention_mask: `[B, T]`, 0 for pads; not together with packed documents.
    """
    with capturing(model, observer):
        model.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=False,
        )


@contextmanager
def capturing(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Makes a teacher report to `observer` while the context is open."""
    before = model.config._attn_implementation
    with ExitStack() as stack:
        for i, layer in enumerate(model.model.layers):
            for handle in _hooks(i, layer.self_attn, observer):
                stack.callback(handle.remove)
        final = model.model.norm.register_forward_hook(lambda m, a, y: observer.on_final(y))
        stack.callback(final.remove)
        stack.callback(model.set_attn_implementation, before)
        model.set_attn_implementation(NAME)
        yield


def _hooks(layer: int, attention: Any, observer: Observer) -> Iterator[Any]:
    def before_attention(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        observer.on_input(layer, args[0] if args else kwargs["hidden_states"])
        return args, {**kwargs, "observer": observer}

    def before_output(_: nn.Module, args: tuple) -> None:
        observer.on_context(layer, args[0])

    yield attention.register_forward_pre_hook(before_attention, with_kwargs=True)
    yield attention.o_proj.register_forward_pre_hook(before_output)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    observer: Observer,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA as the teacher runs it, after a word to the observer."""
    observer.on_attention(module.layer_idx, query, key, attention_mask, scaling)
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


# Both under one name: without the mask function, padding would silently be ignored.
AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
