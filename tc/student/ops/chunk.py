"""The gated delta rule by chunks, with its gradient written out.

Shape letters: B batch, T tokens, H heads, N chunks of a slab, M = N B H, C tokens of a chunk,
K key dim, V value dim.

Inside a chunk that starts at state S, with G the running sum of g, D_ij = exp(G_i - G_j) for
j <= i, a_i = exp(G_i), e_j = exp(G_C - G_j), P = Q K^T * D and A = strict_lower(K K^T * D), the
errors E_i = v_i - S_i^T k_i of the delta rule solve one unit lower-triangular system:

    (I + A diag(beta)) E = V - a K S
    U = beta E;    O = a Q S + P U;    S' = exp(G_C) S + (e K)^T U

(arXiv 2412.06464, section 3.3; the WY form of arXiv 2406.06484.) Solved for E and not for U, since
the gradient of beta is then a product with E, which exists where beta is 0. With dO and dS' given,
and dZ the gradient of the right-hand side:

    dE = beta (P^T dO + e K dS');    dZ = (I + A diag(beta))^-T dE = dV
    dS = exp(G_C) dS' + (a Q)^T dO - (a K)^T dZ

and all else are products inside the chunk. Only the lines with S and dS are sequential. What is
kept for the gradient is S, E and the inverse of the system; the rest is cheaper to make again.

Queries and keys are stacked along the tokens, `[Q; K]` of 2C rows, as are `[dO; -dZ]`: so one
product serves both wherever they meet the same matrix. A slab of some chunks is worked on at a
time, so that what it needs stays in the cache of a core and no temporary grows with T.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tc.student.ops.loop import compute_dtype, empty_state

CHUNK = 32
"""Tokens of a chunk: more make the products larger, and the work inside a chunk with them."""

SLAB = 36
"""Matrices of a batched product, about: fewer cost calls, more cost cache misses."""

BLOCK = 16
"""Rows of the triangular blocks that are solved row by row; larger ones are put together."""


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
    state = empty_state(q, v, initial_state)
    inputs = (q, k, v, g, beta, state)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _ChunkRule.apply(*inputs, scale, resets)
    return _forward(*inputs, scale, resets, None)


class _ChunkRule(torch.autograd.Function):
    """`_forward` and `_backward` for autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        scale: float,
        resets: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept: list[torch.Tensor] = []
        outputs = _forward(q, k, v, g, beta, state, scale, resets, kept)
        ctx.save_for_backward(q, k, v, g, beta, resets, *kept)
        ctx.scale = scale
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor, dstate: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, g, beta, resets, *kept = ctx.saved_tensors
        return (*_backward(q, k, v, g, beta, ctx.scale, resets, kept, do, dstate), None, None)


@dataclass(frozen=True)
class _Span:
    """The tokens of a slab: N chunks of C from `start` on."""

    start: int
    N: int
    C: int

    def chunks(self, x: torch.Tensor) -> torch.Tensor:
        """The span of `[B, T, H, ...]` as a view `[N, B, H, C, ...]`."""
        part = x[:, self.start : self.start + self.N * self.C].unflatten(1, (self.N, self.C))
        return part.permute(1, 0, 3, 2, *range(4, part.dim()))

    def staged(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same as a contiguous copy `[M, C, ...]`."""
        part = self.chunks(x)
        return torch.empty(part.shape, dtype=dtype, device=x.device).copy_(part).flatten(0, 2)

    def states(self, S: torch.Tensor) -> torch.Tensor:
        """Room for the states between the chunks, S at both ends: `[N + 1, B H, K, V]`."""
        states = S.new_empty(self.N + 1, *S.shape)
        states[0] = states[-1] = S
        return states

    def steps(self, states: torch.Tensor, *each: torch.Tensor) -> Iterator:
        """Per chunk: its state, the next one's, and the parts `[B H, ...]` of each `[M, ...]`."""
        S = states.unbind()
        return zip(S, S[1:], zip(*(x.unflatten(0, (self.N, -1)).unbind() for x in each)))


def _spans(heads: int, T: int) -> list[_Span]:
    """Whole chunks by slabs, and what is left of T as a chunk of its own."""
    N, whole = max(1, SLAB // heads), T // CHUNK
    spans = [_Span(n * CHUNK, min(N, whole - n), CHUNK) for n in range(0, whole, N)]
    return spans + ([_Span(whole * CHUNK, 1, T % CHUNK)] if T % CHUNK else [])


@dataclass
class _Slab:
    """What forward and backward both need of a slab, in the dtype of the state.

    Attributes:
        qk: `[Q; K]`, q scaled, `[M, 2C, K]`.
        products: `[P; A]`, A with its diagonal, `[M, 2C, C]`.
        decay: D, `[M, C, C]`.
        beta: `[M, C, 1]`.
        from_start: a, twice, for the rows of `qk`, `[M, 2C, 1]`.
        to_end: e, `[M, C, 1]`.
        through: the decay of a state that passes the chunk, `[M, 1, 1]`.
    """

    qk: torch.Tensor
    products: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    from_start: torch.Tensor
    to_end: torch.Tensor
    through: torch.Tensor

    @property
    def k(self) -> torch.Tensor:
        """Keys `[M, C, K]`."""
        return self.qk.unflatten(1, (2, -1))[:, 1]


def _stage(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    resets: torch.Tensor | None,
    span: _Span,
    dtype: torch.dtype,
) -> _Slab:
    B, _, H, K = q.shape
    N, C, M = span.N, span.C, span.N * B * H
    qk = torch.empty(N, B, H, 2, C, K, dtype=dtype, device=q.device)
    qk[:, :, :, 0], qk[:, :, :, 1] = span.chunks(q), span.chunks(k)
    qk = qk.view(M, 2 * C, K)

    # In float64: in float32 a strong decay in the running sum would drown the weak ones after it.
    # Bounded before the exponential, so that no term above the diagonal overflows.
    G = span.chunks(g).double().cumsum(-1)
    D = (G[..., :, None] - G[..., None, :]).to(dtype).clamp_(max=0).exp_().tril_()
    from_start = G.exp().to(dtype)
    if resets is not None:
        document = span.chunks(resets[:, :, None].long()).cumsum(-1)
        D *= document[..., :, None] == document[..., None, :]
        from_start *= document == 0
    factors = D.new_tensor([scale, 1.0])
    decay = (D.reshape(M, 1, C, C) * factors[:, None, None]).view(M, 2 * C, C)
    return _Slab(
        qk=qk,
        products=torch.bmm(qk, qk[:, C:].mT).mul_(decay),
        decay=decay,
        beta=span.chunks(beta).to(dtype).reshape(M, C, 1),
        from_start=(from_start.reshape(M, 1, C) * factors[:, None]).view(M, 2 * C, 1),
        to_end=D[..., -1, :].reshape(M, C, 1),
        through=from_start[..., -1].reshape(M, 1, 1),
    )


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
    resets: torch.Tensor | None,
    kept: list[torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The read-outs and the final state; the gradient's needs of each slab are added to `kept`."""
    B, T, H, V = v.shape
    o = torch.empty(B, T, H, V, dtype=state.dtype, device=v.device)
    S = state.flatten(0, 1)
    for span in _spans(B * H, T):
        slab = _stage(q, k, g, beta, scale, resets, span, state.dtype)
        slab.products.mul_(slab.beta.mT)
        P, A = slab.products.split(span.C, 1)
        inverse = _invert(A)
        q_start, k_start = (slab.qk * slab.from_start).split(span.C, 1)
        k_end = (slab.k * (slab.to_end * slab.beta)).mT
        Z = span.staged(v, state.dtype)
        E = torch.empty_like(Z)
        states = span.states(S)
        steps = span.steps(states, slab.through, k_start, inverse, k_end, Z, E)
        for S, S_next, (through, k_start_n, inverse_n, k_end_n, Z_n, E_n) in steps:
            torch.bmm(inverse_n, Z_n.baddbmm_(k_start_n, S, alpha=-1), out=E_n)
            torch.mul(S, through, out=S_next)
            S_next.baddbmm_(k_end_n, E_n)
        if kept is not None:
            kept += [states[0].clone(), E, inverse]
        S = states[-1].clone()
        states = states[:-1].flatten(0, 1)
        read = torch.bmm(q_start, states).baddbmm_(P, E)
        span.chunks(o).copy_(read.view(span.N, B, H, -1, V))
    return o, S.view_as(state)


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    resets: torch.Tensor | None,
    kept: list[torch.Tensor],
    do: torch.Tensor,
    dstate: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k, v, g, beta and the initial state."""
    B, T, H, V = v.shape
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
    dS = dstate.flatten(0, 1)
    for span in reversed(_spans(B * H, T)):
        inverse, E, S = (kept.pop() for _ in range(3))
        slab = _stage(q, k, g, beta, scale, resets, span, dstate.dtype)
        q_start, k_start = (slab.qk * slab.from_start).split(span.C, 1)
        k_end = slab.k * (slab.to_end * slab.beta)
        states = span.states(S)
        for S, S_next, (through, k_end_n, E_n) in span.steps(states, slab.through, k_end.mT, E):
            torch.mul(S, through, out=S_next)
            S_next.baddbmm_(k_end_n, E_n)
        dO = span.staged(do, dstate.dtype)
        dE = torch.bmm((slab.products[:, : span.C] * slab.beta.mT).mT, dO)
        dZ = torch.empty_like(dE)
        dstates = span.states(dS)
        torch.bmm(q_start.mT, dO, out=dstates[:-1].flatten(0, 1))
        steps = span.steps(dstates, slab.through, k_start.mT, inverse.mT, k_end, dE, dZ)
        for dS, dS_next, (through, k_start_n, inverse_n, k_end_n, dE_n, dZ_n) in reversed(
            list(steps)
        ):
            torch.bmm(inverse_n, dE_n.baddbmm_(k_end_n, dS_next), out=dZ_n)
            dS.addcmul_(dS_next, through).baddbmm_(k_start_n, dZ_n, alpha=-1)
        dS = dstates[0].clone()
        states, dstates = states[:-1].flatten(0, 1), dstates[1:].flatten(0, 1)
        do_dz = torch.cat([dO, -dZ], 1)
        C = span.C
        dproducts = torch.bmm(do_dz, E.mT)
        dproducts[:, C:].diagonal(dim1=-2, dim2=-1).zero_()
        # By log D, but for beta: what D_ii = 1 gives is kept apart, for a strong decay leaves
        # nothing else, which would be lost beside it.
        dlog = (dproducts * slab.products).unflatten(1, (2, C)).sum(1)
        own = dlog.diagonal(dim1=-2, dim2=-1).clone()
        dlog.diagonal(dim1=-2, dim2=-1).zero_()
        dproducts.mul_(slab.decay * slab.beta.mT)

        dqk = torch.bmm(do_dz, states.mT).mul_(slab.from_start)
        dlog_start = (dqk * slab.qk).sum(-1).unflatten(1, (2, C)).sum(1)
        dqk.baddbmm_(dproducts, slab.k)
        dk_end = torch.bmm(E, dstates.mT)
        dlog_end = (dk_end * slab.k).sum(-1) * slab.to_end[..., 0]
        dk_end.mul_(slab.to_end * slab.beta).baddbmm_(dproducts.mT, slab.qk)
        dlog_through = (states * dstates).sum((1, 2)) * slab.through[:, 0, 0]

        # Each g_t is a factor of a_i and D_ij for t <= i, of e_j and D_ij for j < t, and of what
        # passes the chunk.
        write = slab.beta[..., 0]
        by_query = torch.bmm(dlog, slab.beta)[..., 0] + dlog_start
        by_key = dlog.sum(1)
        dbeta_slab = by_key + own + dlog_end
        by_query -= by_key * write
        ones = dlog.new_ones(C, C)
        spans_t = torch.cat([ones.tril(), ones.triu(1)])
        dg_slab = torch.cat([by_query, dlog_end * write], 1) @ spans_t + dlog_through[:, None]

        grads = ((dq, dqk[:, :C]), (dv, dZ), (dbeta, dbeta_slab), (dg, dg_slab))
        for x, dx in grads:
            target = span.chunks(x)
            target.copy_(dx.view(target.shape))
        target = span.chunks(dk)
        torch.add(dqk[:, C:].view(target.shape), dk_end.view(target.shape), out=target)
    return dq, dk, dv, dg, dbeta, dS.view_as(dstate)


def _invert(x: torch.Tensor) -> torch.Tensor:
    """(I + strict_lower(x))^-1 of matrices `[M, C, C]`.

    [[X, 0], [Y, Z]]^-1 = [[X^-1, 0], [-Z^-1 Y X^-1, Z^-1]], from blocks up that are solved row by
    row, which is slow for larger ones.
    """
    M, C, _ = x.shape
    if C <= BLOCK:
        eye = torch.eye(C, dtype=x.dtype, device=x.device).expand(M, C, C)
        # The diagonal is taken as ones and, like what is above it, never read.
        return torch.linalg.solve_triangular(x, eye, upper=False, unitriangular=True)
    half = C // 2
    first, second = _invert(x[:, :half, :half]), _invert(x[:, half:, half:])
    inverse = torch.zeros_like(x)
    inverse[:, :half, :half], inverse[:, half:, half:] = first, second
    torch.neg(second @ (x[:, half:, :half] @ first), out=inverse[:, half:, :half])
    return inverse
