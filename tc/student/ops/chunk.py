"""The gated delta rule by chunks: matrix products inside a chunk, a state passed between them.

Shape letters: B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim.

With G the running sum of g inside a chunk and D_ij = exp(G_i - G_j) for j <= i, the updates
u_i = beta_i (v_i - S_i^T k_i) of a chunk that starts at state S solve a unit lower-triangular
system:

    (I + strict_lower(beta K K^T * D)) u = beta V - beta exp(G) K S

so one solve per chunk gives both parts, and only the products with S are sequential
(arXiv 2412.06464, section 3.3; the WY form of arXiv 2406.06484).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tc.student.ops.loop import compute_dtype, empty_state

CHUNK = 64


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None,
    resets: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the recurrence chunk by chunk; arguments as `gated_delta_rule`, heads expanded.

    Returns:
        Read-outs `[B, T, H, V]` and the final state `[B, H, K, V]`.
    """
    T, V = v.shape[1], v.shape[-1]
    S = empty_state(q, v, initial_state)
    dtype = compute_dtype(v)
    q, k, v, g, beta = (_chunked(x.to(dtype)) for x in (q, k, v, g, beta))
    q = q * scale
    same, carried = _documents(resets, q)
    D = _decay(g, same)
    from_start = (g.cumsum(-1).exp() * carried)[..., None]
    to_end = D[..., -1, :, None]

    A = (k @ k.mT) * D * beta[..., None]
    rhs = beta[..., None] * torch.cat([v, k * from_start], -1)
    # `unitriangular` takes the diagonal as ones and never reads it: I + strict_lower(A).
    solved = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True)
    u, w = solved.split([V, k.shape[-1]], -1)
    scores = (q @ k.mT) * D
    q_start, k_end = q * from_start, (k * to_end).mT
    through = from_start[..., -1:, :]

    outputs = []
    for n in range(v.shape[2]):
        update = u[:, :, n] - w[:, :, n] @ S
        outputs.append(q_start[:, :, n] @ S + scores[:, :, n] @ update)
        S = S * through[:, :, n] + k_end[:, :, n] @ update
    o = torch.stack(outputs, 2)
    return o.flatten(2, 3)[:, :, :T].transpose(1, 2), S


def _chunked(x: torch.Tensor) -> torch.Tensor:
    """`[B, T, H, ...]` to `[B, H, N, C, ...]`, with zeros, which change nothing, at the end."""
    T = x.shape[1]
    C = min(CHUNK, T)
    x = x.transpose(1, 2)
    x = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, -T % C))
    return x.unflatten(2, (-1, C))


def _decay(g: torch.Tensor, same: torch.Tensor | None) -> torch.Tensor:
    """D_ij = exp(g_{j+1} + ... + g_i) where token i sees token j, else 0; `[B, H, N, C, C]`.

    Summed pair by pair: in the difference of two running sums a strong decay would drown the small
    ones after it, and the gradient of g. Masked before the exponential, so that no discarded term
    can overflow.
    """
    C = g.shape[-1]
    sees = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()
    total = g[..., :, None].expand(*g.shape, C).masked_fill(~sees.tril(-1), 0).cumsum(-2)
    if same is not None:
        sees = sees & same
    return total.masked_fill(~sees, -torch.inf).exp()


def _documents(
    resets: torch.Tensor | None, q: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | float]:
    """What document boundaries allow inside each chunk.

    Returns:
        `same` `[B, 1, N, C, C]`: tokens i and j are of one document; `carried` `[B, 1, N, C]`:
        token i still sees the state before the chunk.
    """
    if resets is None:
        return None, 1.0
    document = _chunked(resets[:, :, None].long()).cumsum(-1)
    same = document[..., :, None] == document[..., None, :]
    carried = (document == 0).to(q.dtype)
    return same, carried
