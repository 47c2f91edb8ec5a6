"""The recurrent state of a mixer inside a standard `transformers` cache."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer


class RecurrentLayer(LinearAttentionLayer, CacheLayerMixin):
    """A cache layer that holds a state `[B, H, K, V]` and counts the tokens it has seen.

    It answers the questions that `transformers` asks of a layer with keys and values (length, mask
    sizes), so that a student with no attention left generates as well.

    Args:
        max_length: the length of the cache's other layers where that is fixed, else -1.
    """

    def __init__(self, max_length: int = -1) -> None:
        LinearAttentionLayer.__init__(self)
        self.max_length, self.num_tokens = max_length, 0

    def store(self, state: torch.Tensor, num_tokens: int) -> None:
        """Keeps the state after `num_tokens` more tokens.

        The tensor itself, not a copy into the last one: that may belong to another batch size, and
        to a graph that is yet to be differentiated.
        """
        self.device, self.dtype = state.device, state.dtype
        self.recurrent_states[0] = state
        self.is_recurrent_states_initialized[0] = self.has_previous_state[0] = True
        self.num_tokens += num_tokens

    @property
    def state(self) -> torch.Tensor | None:
        """The state after the last token, or None before the first."""
        return self.recurrent_states[0] if self.has_previous_state[0] else None

    def get_seq_length(self) -> int:
        """Tokens seen so far."""
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask over all tokens covers.

        One mask serves all layers, and its sizes may be asked of this one: a cache of fixed length
        has room behind the last token, which the mask must hide.
        """
        return max(self.max_length, self.num_tokens + query_length), 0

    def update(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuses keys and values: this layer has a state instead."""
        raise TypeError("a Gated DeltaNet layer caches a recurrent state, not keys and values")

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self.num_tokens = 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence of the batch."""
        if self.state is not None:
            self.recurrent_states[0] = self.state.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the named sequences of the batch."""
        if self.state is not None:
            self.recurrent_states[0] = self.state[indices]


def recurrent_layer(cache: Cache, layer_idx: int) -> RecurrentLayer:
    """The recurrent layer of a cache, put there on first use.

    Caches are made by `transformers` from the teacher's layer types, with keys and values for every
    layer; a converted layer takes its place when it first runs.
    """
    while len(cache.layers) <= layer_idx:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx]
    if not isinstance(layer, RecurrentLayer):
        layer = cache.layers[layer_idx] = RecurrentLayer(layer.get_max_length())
    return layer
