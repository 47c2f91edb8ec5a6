"""The gated delta rule by chunks, with its gradient written out.

Shape letters: B batch, T tokens, H heads, C tokens of a chunk, K key dim, V value dim, R = B H rows
of a batch, M = R times the chunks at hand.

In a chunk that starts at state S, let G be the running sum of g, D_ij = exp(G_i - G_j) for j <= i,
a_i = exp(G_i), e_j = D_Cj, P = Q K^T * D and A = strict_lower(K K^T * D). The errors of the delta
rule, E_i = v_i - exp(g_i) S_{i-1}^T k_i, solve a unit lower-triangular system:

    (I + A diag(beta)) E = V - a K S
    O = scale (a Q S + P beta E)
    S' = exp(G_C) S + (e beta K)^T E

(arXiv 2412.06464, section 3.3; the WY form of arXiv 2406.06484.) Solved for E and not for beta E,
since the gradient of beta is a product with E, also where beta is 0. Given dO (times scale) and
dS', and with dZ the gradient of the system's right-hand side:

    dZ = (I + A diag(beta))^-T ((P beta)^T dO + e beta K dS') = dV
    dS = exp(G_C) dS' + (a Q)^T dO - (a K)^T dZ

All else are products inside the chunks: only the lines for E, S and for dZ, dS go chunk by chunk.
E, the states and the inverse of the system are kept for the gradient; the rest is as cheap to make
again.

Queries and keys are stacked, and so are dO and -dZ: one product serves both halves wherever they
meet the same matrix. A slab of some chunks is worked on at a time, so that what it needs stays in a
core's cache; but for what is kept, only numbers per token and head grow with T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tc.student.ops.loop import empty_state

CHUNK = 32
"""Tokens of a chunk: the work inside a chunk grows with it, that between chunks shrinks."""

SLAB = 48
"""Rows times chunks of a slab, about: fewer cost calls, more cost cache misses."""

LOWEST = -1000.0
"""Of a log decay: its exponential is exactly 0, and a sum of some has all digits of weak ones."""


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
    # All products are in the dtype of the state, also where the caller's would not be.
    with torch.autocast(v.device.type, enabled=False):
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            return _ChunkRule.apply(*inputs, scale, resets)
        return _forward(None, *inputs, scale, resets)


class _ChunkRule(torch.autograd.Function):
    """`_forward` and `_backward` for autograd; arguments are those of `_forward` after `kept`."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kept: list[torch.Tensor] = []
        outputs = _forward(kept, *arguments)
        *inputs, _state, ctx.scale, resets = arguments
        ctx.save_for_backward(*inputs, resets, *kept)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor, dstate: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, g, beta, resets, *kept = ctx.saved_tensors
        with torch.autocast(v.device.type, enabled=False):
            grads = _backward(q, k, v, g, beta, ctx.scale, resets, kept, do, dstate)
        return (*grads, None, None)


@dataclass(frozen=True)
class _Run:
    """Chunks of one length, C, from token `start` on."""

    start: int
    num_chunks: int
    C: int

    def chunks(self, x: torch.Tensor) -> torch.Tensor:
        """These tokens of `[B, T, H, ...]` as a view `[num_chunks, B, H, C, ...]`."""
        part = x[:, self.start : self.start + self.num_chunks * self.C]
        part = part.unflatten(1, (self.num_chunks, self.C))
        return part.permute(1, 0, 3, 2, *range(4, part.dim()))

    def rows(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """These tokens of `[B, T, H]` as `[M, C]`, all chunks of the run."""
        return self.chunks(x).to(dtype).reshape(-1, self.C)

    def slabs(self, R: int) -> list[tuple[slice, slice]]:
        """The chunks of each slab, and its rows of `[M, ...]`."""
        step = max(1, SLAB // R)
        ends = [min(n + step, self.num_chunks) for n in range(0, self.num_chunks, step)]
        starts = [0, *ends[:-1]]
        return [(slice(a, b), slice(a * R, b * R)) for a, b in zip(starts, ends, strict=True)]


def _runs(T: int) -> list[_Run]:
    """Whole chunks, and what is left of T as a chunk of its own."""
    whole, rest = divmod(T, CHUNK)
    runs = [_Run(0, whole, CHUNK), _Run(whole * CHUNK, 1, rest)]
    return [run for run in runs if run.num_chunks and run.C]


class _Inputs:
    """What forward and backward both read of a run's inputs, in the dtype of the state.

    Attributes:
        q, k: views `[num_chunks, B, H, C, K]`.
        G: running sums of g in each chunk, `[M, C]`.
        from_start: a, `[M, C]`.
        document: counts documents in each chunk, `[M, C]`, or None where none begins.
        through: the decay of a state that passes a chunk, `[M, 1, 1]`.
        beta: `[M, C]`.
    """

    def __init__(
        self,
        run: _Run,
        q: torch.Tensor,
        k: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        resets: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.q, self.k = run.chunks(q), run.chunks(k)
        # In float64: in float32 a strong decay in a running sum would drown the weak ones after it.
        # Bounded, since a huge one would drown them even so, and -inf - -inf is NaN.
        self.G = run.rows(g, torch.float64).clamp(min=LOWEST).cumsum(-1)
        self.from_start = self.G.exp().to(dtype)
        self.document = None
        if resets is not None:
            self.document = run.rows(resets[:, :, None].expand_as(g), torch.int64).cumsum(-1)
            self.from_start *= self.document == 0
        self.through = self.from_start[:, -1, None, None]
        self.beta = run.rows(beta, dtype)

    def slab(self, chunks: slice, rows: slice) -> _Slab:
        """What depends on the tokens of some chunks alone."""
        G, beta, from_start = self.G[rows], self.beta[rows], self.from_start[rows]
        M, C = G.shape
        D = torch.sub(G[:, :, None], G[:, None], out=beta.new_empty(M, C, C))
        # Bounded first, or what is above the diagonal could overflow.
        D.clamp_(max=0).exp_().tril_()
        if self.document is not None:
            document = self.document[rows]
            D *= document[:, :, None] == document[:, None]
        q, k = self.q[chunks], self.k[chunks]
        qk = beta.new_empty(*q.shape[:3], 2, *q.shape[3:])
        qk[:, :, :, 0], qk[:, :, :, 1] = q, k
        qk = qk.view(M, 2 * C, -1)
        products = torch.bmm(qk, qk[:, C:].mT).view(M, 2, C, C).mul_(D[:, None])
        return _Slab(
            qk=qk,
            start=(qk.view(M, 2, C, -1) * from_start[:, None, :, None]).view_as(qk),
            products=products,
            decay=D,
            beta=beta,
            from_start=from_start,
            through=self.through[rows],
        )


@dataclass
class _Slab:
    """What forward and backward both need of a slab.

    Attributes:
        qk: [Q; K], `[M, 2C, K]`.
        start: [a Q; a K], `[M, 2C, K]`.
        products: [P; A], A with its diagonal, `[M, 2, C, C]`.
        decay: D, `[M, C, C]`.
        beta: `[M, C]`.
        from_start: a, `[M, C]`.
        through: exp(G_C), `[M, 1, 1]`.
    """

    qk: torch.Tensor
    start: torch.Tensor
    products: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    from_start: torch.Tensor
    through: torch.Tensor

    @property
    def k(self) -> torch.Tensor:
        """Keys, `[M, C, K]`."""
        return self.qk[:, self.decay.shape[1] :]

    @property
    def to_end(self) -> torch.Tensor:
        """e, `[M, C]`."""
        return self.decay[:, -1]

    def k_end(self) -> torch.Tensor:
        """e beta K, `[M, C, K]`."""
        return self.k * (self.to_end * self.beta)[..., None]


def _forward(
    kept: list[torch.Tensor] | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
    resets: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The read-outs and the final state; what the gradient needs of each slab goes to `kept`."""
    o = torch.empty(v.shape, dtype=state.dtype, device=v.device)
    S = state.flatten(0, 1)
    R, _, V = S.shape
    for run in _runs(v.shape[1]):
        inputs = _Inputs(run, q, k, g, beta, resets, S.dtype)
        values, outputs = run.chunks(v), run.chunks(o)
        for chunks, rows in run.slabs(R):
            slab, out = inputs.slab(chunks, rows), outputs[chunks]
            P_beta, A_beta = (slab.products * slab.beta[:, None, None]).unbind(1)
            inverse = _invert(A_beta)
            q_start, k_start = slab.start.chunk(2, 1)
            Z = torch.empty(out.shape, dtype=S.dtype, device=S.device).copy_(values[chunks])
            Z = Z.view(-1, run.C, V)
            E, states = torch.empty_like(Z), _states(S, len(Z))
            states[0] = S
            steps = _by_chunk(states, slab.through, k_start, inverse, slab.k_end().mT, Z, E)
            for S_n, S_next, through, k_start_n, inverse_n, k_end_n, Z_n, E_n in steps:
                torch.bmm(inverse_n, Z_n.baddbmm_(k_start_n, S_n, alpha=-1), out=E_n)
                torch.mul(S_n, through, out=S_next).baddbmm_(k_end_n, E_n)
            S, states = states[-1].clone(), states[:-1].flatten(0, 1)
            if kept is not None:
                kept += [states, E, inverse]
            read = torch.bmm(q_start, states).baddbmm_(P_beta, E)
            torch.mul(read.view(out.shape), scale, out=out)
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
    """The gradients of q, k, v, g, beta and the initial state; empties `kept`."""
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
    dS = dstate.flatten(0, 1)
    for run in reversed(_runs(v.shape[1])):
        inputs = _Inputs(run, q, k, g, beta, resets, dS.dtype)
        douts, *targets = (run.chunks(x) for x in (do, dq, dk, dv))
        sums: list[tuple[torch.Tensor, ...]] = []
        for chunks, rows in reversed(run.slabs(len(dS))):
            slab, (dq_out, dk_out, dv_out) = inputs.slab(chunks, rows), (x[chunks] for x in targets)
            inverse, E, states = (kept.pop() for _ in range(3))
            dO = torch.empty(dv_out.shape, dtype=dS.dtype, device=dS.device)
            dO = torch.mul(douts[chunks], scale, out=dO).view_as(E)
            dZ, dstates = _back_through_chunks(slab, inverse, dO, dS)
            dS, dstates = dstates[0].clone(), dstates[1:].flatten(0, 1)
            dqk, dk_more, *by_token = _back_inside_chunks(slab, E, states, dO, dZ, dstates)
            dq_part, dk_part = (x.view(dq_out.shape) for x in dqk.split(run.C, 1))
            dq_out.copy_(dq_part)
            torch.add(dk_part, dk_more.view(dk_out.shape), out=dk_out)
            dv_out.copy_(dZ.view(dv_out.shape))
            sums.insert(0, tuple(by_token))
        by_beta, by_query, by_end, by_through = map(torch.cat, zip(*sums, strict=True))
        # Each g_t is a factor of a_i and D_ij for t <= i, of e_j and D_ij for j < t, and of what
        # passes the chunk.
        ones = by_query.new_ones(run.C, run.C)
        by_g = torch.cat([by_query, by_end], 1) @ torch.cat([ones.tril(), ones.triu(1)])
        for x, dx in ((dbeta, by_beta), (dg, by_g + by_through[:, None])):
            target = run.chunks(x)
            target.copy_(dx.view(target.shape))
    return dq, dk, dv, dg, dbeta, dS.view_as(dstate)


def _back_through_chunks(
    slab: _Slab,
    inverse: torch.Tensor,
    dO: torch.Tensor,
    dS: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequential part, from the last chunk of a slab to its first.

    Args:
        slab: the slab.
        inverse: of its systems, `[M, C, C]`.
        dO: by the read-outs, times scale, `[M, C, V]`.
        dS: by the state after the slab, `[R, K, V]`.

    Returns:
        dZ `[M, C, V]`, and dS of all states, as `_states` has them.
    """
    q_start, k_start = slab.start.mT.chunk(2, -1)
    dE = torch.bmm((slab.products[:, 0] * slab.beta[:, None]).mT, dO)
    dZ, dstates = torch.empty_like(dE), _states(dS, len(dE))
    torch.bmm(q_start, dO, out=dstates[:-1].flatten(0, 1))
    dstates[-1] = dS
    steps = _by_chunk(dstates, slab.through, k_start, inverse.mT, slab.k_end(), dE, dZ)
    for dS_n, dS_next, through, k_start_n, inverse_n, k_end_n, dE_n, dZ_n in reversed(list(steps)):
        torch.bmm(inverse_n, dE_n.baddbmm_(k_end_n, dS_next), out=dZ_n)
        dS_n.addcmul_(dS_next, through).baddbmm_(k_start_n, dZ_n, alpha=-1)
    return dZ, dstates


def _back_inside_chunks(
    slab: _Slab,
    E: torch.Tensor,
    states: torch.Tensor,
    dO: torch.Tensor,
    dZ: torch.Tensor,
    dstates: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """What the chunks of a slab give, each by itself.

    Args:
        slab: the slab.
        E: its errors, `[M, C, V]`.
        states: before each chunk, `[M, K, V]`.
        dO: by the read-outs, times scale, `[M, C, V]`.
        dZ: by the right-hand sides, `[M, C, V]`.
        dstates: by the state after each chunk, `[M, K, V]`.

    Returns:
        The gradients of [Q; K] `[M, 2C, K]` and what comes to that of K `[M, C, K]`; by beta, by
        G_i as the later end of a decay and what e gives as the earlier one, `[M, C]`; by G_C of
        the state that passes, `[M]`.
    """
    M, C, _ = E.shape
    do_dz = torch.cat([dO, -dZ], 1)
    dproducts = torch.bmm(do_dz, E.mT).view_as(slab.products)
    dproducts[:, 1].diagonal(dim1=-2, dim2=-1).zero_()
    # By log D, but for the factor beta. What D_ii = 1 gives is kept apart: where the decay is
    # strong all else is tiny, and would be lost beside it.
    dlog = (dproducts * slab.products).sum(1)
    own = dlog.diagonal(dim1=-2, dim2=-1).clone()
    dlog.diagonal(dim1=-2, dim2=-1).zero_()
    dproducts.mul_((slab.decay * slab.beta[:, None])[:, None])
    dproducts = dproducts.view(M, 2 * C, C)

    dqk = torch.bmm(do_dz, states.mT)
    dlog_start = (dqk * slab.start).sum(-1).view(M, 2, C).sum(1)
    dqk.view(M, 2, C, -1).mul_(slab.from_start[:, None, :, None])
    dqk.baddbmm_(dproducts, slab.k)
    dk_end = torch.bmm(E, dstates.mT)
    dlog_end = (dk_end * slab.k).sum(-1) * slab.to_end
    dk_end.mul_((slab.to_end * slab.beta)[..., None]).baddbmm_(dproducts.mT, slab.qk)

    by_key = dlog.sum(1)
    by_query = torch.bmm(dlog, slab.beta[..., None])[..., 0] + dlog_start - by_key * slab.beta
    by_through = (states * dstates).sum((1, 2)) * slab.through[:, 0, 0]
    return dqk, dk_end, by_key + own + dlog_end, by_query, dlog_end * slab.beta, by_through


def _states(S: torch.Tensor, M: int) -> torch.Tensor:
    """Room for the states between the chunks of a slab and at both ends, `[M / R + 1, R, K, V]`."""
    return S.new_empty(M // len(S) + 1, *S.shape)


def _by_chunk(states: torch.Tensor, *parts: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """For each chunk the state before it, the one after it, and its rows of parts `[M, ...]`."""
    R, each = states.shape[1], states.unbind()
    return zip(each, each[1:], *(x.split(R) for x in parts), strict=False)


def _invert(x: torch.Tensor) -> torch.Tensor:
    """(I + strict_lower(x))^-1 of matrices `[M, C, C]`; the rest of x is never read."""
    # From the right: in the order of rows that the matrices have, it is twice as fast.
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(x.shape).mT
    return torch.linalg.solve_triangular(x, eye, upper=False, left=False, unitriangular=True)
