"""What the other rooms may ask of a teacher's attention module."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Attention(Protocol):
    """A `self_attn` that `check_convertible` has approved.

    Attributes:
        q_proj, k_proj, v_proj, o_proj: the projections.
        head_dim: K, in which q_proj's and k_proj's outputs are cut to heads.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    head_dim: int


def head_norm(attention: Attention, name: str) -> nn.Module | None:
    """The per-head RMSNorm `q_norm` or `k_norm` of a Qwen3 teacher, None where there is none."""
    norm = getattr(attention, name, None)
    assert norm is None or isinstance(norm.weight, torch.Tensor)
    return norm
