"""The optimizer and the learning-rate schedules that alignment and recovery share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tc.config import OptimizerKind, Schedule

ORTHOGONAL = ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers whose weights Muon trains; embeddings, heads and everything small are AdamW's."""


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for matrices and `torch.optim.AdamW` for the rest, as one optimizer.

    Muon's step is scaled to the RMS that AdamW's has (`match_rms_adamw`).

    Args:
        groups: of `parameter_groups`; one with `muon=True` holds two-dimensional parameters only.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._parts: list[torch.optim.Optimizer] = []
        muon = [group for group in groups if group["muon"]]
        if muon:
            self._parts.append(torch.optim.Muon(muon, adjust_lr_fn="match_rms_adamw"))
        other = [group for group in groups if not group["muon"]]
        if other:
            self._parts.append(torch.optim.AdamW(other))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    kind: OptimizerKind,
    weight_decay: float,
    rate: Callable[[str], float],
) -> list[dict[str, Any]]:
    """Groups parameters by learning rate, weight decay, and who trains them.

    Weight decay is for matrices alone: A_log, dt_bias, norms and biases are vectors, and decaying
    them would pull half-lives and scales to arbitrary values.

    Args:
        named: parameters that are trained, by name.
        kind: whether matrices of linear layers go to Muon.
        weight_decay: of matrices.
        rate: the learning rate of a name.
    """
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in named:
        is_matrix = parameter.dim() >= 2
        # A stack of matrices, as experts have, is not for `torch.optim.Muon`.
        muon = kind is OptimizerKind.muon and parameter.dim() == 2 and trained_by_muon(name)
        key = (rate(name), weight_decay if is_matrix else 0.0, muon)
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": params, "lr": lr, "weight_decay": decay, "muon": muon}
        for (lr, decay, muon), params in groups.items()
    ]


def trained_by_muon(name: str) -> bool:
    """Whether a matrix of this name is Muon's under `muon`."""
    return any(part in ORTHOGONAL for part in name.split("."))


def rate_factor(
    schedule: Schedule,
    done: float,
    total: float,
    warmup: float = 0.0,
    decay_share: float = 0.2,
    size: float = 1.0,
) -> float:
    """What a learning rate is multiplied by, from 0 to 1.

    Args:
        schedule: its shape.
        done: steps or tokens before this step.
        total: steps or tokens in all.
        warmup: steps or tokens of linear warm-up, on top of the schedule.
        decay_share: the last share of the total, over which wsd goes linearly to zero.
        size: steps or tokens of this step.
    """
    rising = 1.0 if warmup <= 0 else min(1.0, (done + size) / warmup)
    share = min(1.0, done / total)
    if schedule is Schedule.cosine:
        return rising * 0.5 * (1 + math.cos(math.pi * share))
    if schedule is Schedule.wsd:
        return rising * min(1.0, (1 - share) / decay_share)
    return rising
