"""The way of the student's residual stream through the model, block by block."""

from __future__ import annotations

from itertools import pairwise

from transformers import PreTrainedModel

from tc.align.run import decoder_layer
from tc.data import Packed
from tc.student.mixer import GatedDeltaNet
from tc.teacher.stream import Stream


def blocks_of(converted: list[int], largest: int) -> list[list[int]]:
    """Consecutive converted layers, in blocks of at most `largest`, as even as can be."""
    runs: list[list[int]] = []
    for layer in sorted(converted):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [block for run in runs for block in _even(run, largest)]


def _even(run: list[int], largest: int) -> list[list[int]]:
    number = -(-len(run) // largest)
    cuts = [len(run) * i // number for i in range(number + 1)]
    return [run[start:stop] for start, stop in pairwise(cuts)]


class Walk:
    """Goes with the student's stream of some tokens from layer to layer, no further than asked.

    Args:
        model: the teacher.
        tokens: packed tokens by part.

    Attributes:
        mixers: the finished mixers by layer; other layers are the teacher's own.
    """

    def __init__(self, model: PreTrainedModel, tokens: dict[str, Packed]) -> None:
        self.model, self.tokens = model, tokens
        self.mixers: dict[int, GatedDeltaNet] = {}
        self._streams: dict[str, Stream] | None = None
        self._at = 0

    def reach(self, layer: int) -> dict[str, Stream]:
        """The streams in front of a layer, which must not lie behind the last one asked for."""
        assert layer >= self._at, f"layer {layer} is behind layer {self._at}"
        if self._streams is None:
            self._streams = {
                part: Stream(self.model, packed.input_ids, packed.position_ids)
                for part, packed in self.tokens.items()
            }
        layers = [
            decoder_layer(self.model, i, self.mixers[i])
            if i in self.mixers
            else self.model.model.layers[i]
            for i in range(self._at, layer)
        ]
        for stream in self._streams.values():
            stream.advance(layers)
        self._at = layer
        return self._streams
