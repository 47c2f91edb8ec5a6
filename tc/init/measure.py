"""Running a mixer over a layer's activations, and how far it is from its teacher.

Shape letters: N sequences, T tokens, H heads, V value dim, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tc.stats import LayerBatch
from tc.student.mixer import GatedDeltaNet
from tc.teacher.attention import Attention

SEQUENCES = 8
"""Sequences that go through a mixer at once, which bounds the memory."""


def batches(batch: LayerBatch) -> Iterator[LayerBatch]:
    """Cuts activations to pieces of `SEQUENCES`."""
    for start in range(0, len(batch), SEQUENCES):
        yield batch[start : start + SEQUENCES]


def read_out(mixer: GatedDeltaNet, batch: LayerBatch) -> torch.Tensor:
    """The state's answers before norm and gate, `[N, T, H, V]`."""
    return mixer.read_out(batch.x, resets=batch.starts)[0]


def features(mixer: GatedDeltaNet, batch: LayerBatch) -> torch.Tensor:
    """What the mixer's o_proj reads, `[N, T, H V]`."""
    return mixer.features(batch.x, read_out(mixer, batch))


@torch.no_grad()
def outputs(mixer: GatedDeltaNet, batch: LayerBatch) -> torch.Tensor:
    """The mixer's output, `[N, T, D]`."""
    return torch.cat([mixer.o_proj(features(mixer, b)) for b in batches(batch)])


@torch.no_grad()
def relative_error(mixer: GatedDeltaNet, attention: Attention, batch: LayerBatch) -> float:
    """||student - teacher||^2 / ||teacher||^2 of a layer's output over all tokens."""
    gap, power = 0.0, 0.0
    for part in batches(batch):
        teacher = attention.o_proj(part.context).double()
        student = mixer.o_proj(features(mixer, part)).double()
        gap += float((student - teacher).square().sum())
        power += float(teacher.square().sum())
    return gap / power
