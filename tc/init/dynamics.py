"""Decay and write gate from the teacher's attention statistics.

Source: arXiv 2606.16429, Phase 1. Shape letters: N sequences, T tokens, H heads, D model dim.
"""

from __future__ import annotations

import math

import torch

from tc.config import Sinks
from tc.student.mixer import GatedDeltaNet, inverse_softplus

MIN_DISTANCE = 0.5
"""Tokens. A head that only looks at its own token has distance 0, which no half-life can have."""


def half_lives(
    statistics: dict[str, torch.Tensor], sinks: Sinks, scale: float = 1.0
) -> torch.Tensor:
    """The tokens after which each head's memory halves: its mean attention distance d, `[H]`.

    The paper takes d itself. But the mean is drawn out by few far tokens, and a memory of half-life
    h has mean distance 1.44 h: a quarter of d is closer, and starts better.

    With `Sinks.keep`, attention on the first token counts as distance (the paper's own way). No
    distance exceeds what the calibration window lets it be.
    """
    name = "distance" if sinks is Sinks.keep else "free_distance"
    return (scale * statistics[name]).clamp_min(MIN_DISTANCE)


def concentrations(statistics: dict[str, torch.Tensor], sinks: Sinks) -> torch.Tensor:
    """How concentrated each head's attention is within its layer, c in [0, 1], `[H]`.

    One minus the entropy's min-max over the layer's heads; 0.5 where all heads are alike.
    """
    entropy = statistics["entropy" if sinks is Sinks.keep else "free_entropy"]
    low, high = entropy.min(), entropy.max()
    if high - low <= 1e-9 * high.abs().clamp_min(1):
        return torch.full_like(entropy, 0.5)
    return 1 - (entropy - low) / (high - low)


@torch.no_grad()
def set_decay(mixer: GatedDeltaNet, half_life: torch.Tensor) -> None:
    """A_log = 0 and dt_bias = softplus^-1(ln 2 / d): the memory of head h halves after d_h tokens.

    This holds where a_proj x is zero; `centre_rows` makes it so on average.

    Args:
        mixer: changed in place.
        half_life: d `[H]`, in tokens.
    """
    mixer.A_log.zero_()
    mixer.dt_bias.copy_(inverse_softplus(math.log(2) / half_life))


@torch.no_grad()
def set_write_gate(mixer: GatedDeltaNet, beta: torch.Tensor, mean_x: torch.Tensor) -> None:
    """b_proj such that the mean logit over tokens is logit(beta).

    Args:
        mixer: changed in place.
        beta: the wanted write strengths `[H]`, between 0 and 1; the paper's are 0.3 + 0.4 c.
        mean_x: the mean input over calibration tokens `[D]`.
    """
    set_mean(mixer.b_proj.weight, mean_x, torch.logit(beta))


@torch.no_grad()
def centre_rows(mixer: GatedDeltaNet, mean_x: torch.Tensor) -> None:
    """a_proj such that its mean over tokens is zero, so that `set_decay` holds on average."""
    set_mean(mixer.a_proj.weight, mean_x, torch.zeros(mixer.num_heads))


def set_mean(weight: torch.Tensor, mean_x: torch.Tensor, target: torch.Tensor) -> None:
    """Changes rows as little as possible so that `weight @ mean_x` equals `target`, in place.

    The mean logit moves, not the spread: each row only gains a multiple of the mean input.

    Args:
        weight: `[H, D]`.
        mean_x: `[D]`, not zero, on the weight's device.
        target: `[H]`, on any device.
    """
    mean = mean_x.double()
    gap = target.to(mean) - weight.double() @ mean
    weight.add_((gap[:, None] * mean / mean.square().sum()).to(weight.dtype))
