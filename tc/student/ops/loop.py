"""The gated delta rule token by token: the reference that the other back ends must equal.

Shape letters: B batch, T tokens, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import torch


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that states are held in: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def empty_state(q: torch.Tensor, v: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    """The state to start from, `[B, H, K, V]`: the given one, or zeros."""
    dtype = compute_dtype(v)
    if state is not None:
        return state.to(dtype)
    B, _, H, K = q.shape
    return torch.zeros(B, H, K, v.shape[-1], dtype=dtype, device=v.device)


def loop_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None,
    resets: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the recurrence one token at a time; arguments as `gated_delta_rule`, heads expanded.

    Returns:
        Read-outs `[B, T, H, V]` and the final state `[B, H, K, V]`.
    """
    dtype = compute_dtype(v)
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    S = empty_state(q, v, initial_state)
    outputs = []
    for t in range(v.shape[1]):
        if resets is not None:
            S = S.masked_fill(resets[:, t, None, None, None], 0)
        S = S * g[:, t, :, None, None].exp()
        seen = (S * k[:, t, :, :, None]).sum(-2)
        update = beta[:, t, :, None] * (v[:, t] - seen)
        S = S + k[:, t, :, :, None] * update[:, :, None, :]
        outputs.append((S * q[:, t, :, :, None]).sum(-2) * scale)
    return torch.stack(outputs, dim=1), S
