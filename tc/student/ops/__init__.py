"""The gated delta rule: one function, three back ends, the same results on finite inputs.

Shape letters: B batch, T tokens, H heads, K key dim, V value dim.

Per head, with state S of K x V, log decay g_t <= 0 and write strength beta_t in [0, 1]:

    S_t = exp(g_t) S_{t-1}
    S_t = S_t + beta_t k_t (v_t - S_t^T k_t)^T
    o_t = scale S_t^T q_t

(arXiv 2412.06464, and FLA's `chunk_gated_delta_rule`, whose conventions these are, but for packed
documents: where FLA takes one row and `cu_seqlens`, here every row of a batch may hold documents,
and `resets` is True where one begins: `resets[0, cu_seqlens[:-1]] = True`.)
"""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch

from tc.student.ops.chunk import chunk_gated_delta_rule
from tc.student.ops.fla import fla_gated_delta_rule
from tc.student.ops.loop import loop_gated_delta_rule

BACKENDS = {
    "loop": loop_gated_delta_rule,
    "chunk": chunk_gated_delta_rule,
    "fla": fla_gated_delta_rule,
}

L2NORM_EPS = 1e-6
"""FLA's epsilon, under the root: x / sqrt(sum x^2 + eps)."""


# Compiled, the loops over chunks would be unrolled anew for every length: minutes for one layer.
@torch.compiler.disable
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    mask: torch.Tensor | None = None,
    resets: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs the gated delta rule over a batch of sequences.

    Args:
        q: queries `[B, T, H', K]`; `H'` divides H, and head h reads query head `h // (H / H')`.
        k: keys `[B, T, H', K]`.
        v: values `[B, T, H, V]`.
        g: log decay `[B, T, H]`, at most 0.
        beta: write strength `[B, T, H]`, from 0 to 1.
        scale: factor of the read-out, `K ** -0.5` by default.
        initial_state: `[B, H, K, V]`, float32, or None for an empty one.
        output_final_state: whether the state after the last token is returned.
        use_qk_l2norm_in_kernel: whether q and k are scaled to unit norm first.
        mask: bool `[B, T]`, False where a token is padding: it writes nothing, decays nothing, and
            its own output is zero.
        resets: bool `[B, T]`, True at the first token of a document that must not see what came
            before it; None where no document begins. What came before must be finite: only the
            loop stops a NaN there.
        backend: `loop`, `chunk`, `fla`, or `auto`: FLA for CUDA tensors (where it is missing, a
            warning and what follows), the loop for one token, chunked PyTorch otherwise.

    Returns:
        Read-outs `[B, T, H, V]` in v's dtype, and the final state `[B, H, K, V]` in float32
        (float64 for float64 inputs), or None.

    Raises:
        ValueError: for shapes that do not fit, a mask or resets that are not bool, or an unknown
            back end.
    """
    _check_shapes(q, k, v, g, beta, initial_state, mask, resets)
    if mask is not None:
        # Contents of pads are dropped before anything is multiplied: a NaN there stays there, and
        # its gradient is zero.
        pad = ~mask[:, :, None]
        g, beta = g.masked_fill(pad, 0), beta.masked_fill(pad, 0)
        q, k, v = (x.masked_fill(pad[..., None], 0) for x in (q, k, v))
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q, k = (_expand_heads(x, v.shape[2]) for x in (q, k))
    if scale is None:
        scale = q.shape[-1] ** -0.5
    run = BACKENDS[_choose(backend, q)]
    o, state = run(q, k, v, g, beta, scale, initial_state, resets)
    return o.to(v.dtype), state if output_final_state else None


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Scales the last dimension to unit norm, in float32 at least, with FLA's epsilon."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2NORM_EPS)).to(x.dtype)


def _choose(backend: str, q: torch.Tensor) -> str:
    if backend == "auto":
        if q.is_cuda and _has_fla():
            return "fla"
        return "loop" if q.shape[1] == 1 else "chunk"
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}; allowed: auto, {', '.join(BACKENDS)}")
    return backend


@functools.cache
def _has_fla() -> bool:
    if importlib.util.find_spec("fla") is not None:
        return True
    warnings.warn(
        "flash-linear-attention is not installed: the gated delta rule runs in plain PyTorch on "
        "this GPU, which is slower: pip install flash-linear-attention",
        stacklevel=2,
    )
    return False


def _expand_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    groups = num_heads // x.shape[2]
    return x if groups == 1 else x.repeat_interleave(groups, dim=2)


def _check_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    mask: torch.Tensor | None,
    resets: torch.Tensor | None,
) -> None:
    for name, flags in (("mask", mask), ("resets", resets)):
        if flags is not None and flags.dtype != torch.bool:
            raise ValueError(f"{name} is {flags.dtype}; wanted torch.bool: {name}.bool()")
    B, T, H, V = v.shape if v.dim() == 4 else (0, 0, 0, 0)
    wrong = {
        "v": 0 in (B, T, H, V),
        "k": k.shape != q.shape,
        "q": q.dim() != 4 or q.shape[:2] != (B, T) or 0 in q.shape or H % q.shape[2] != 0,
        "g": g.shape != (B, T, H),
        "beta": beta.shape != (B, T, H),
        "initial_state": state is not None and state.shape != (B, H, q.shape[-1], V),
        "mask": mask is not None and mask.shape != (B, T),
        "resets": resets is not None and resets.shape != (B, T),
    }
    bad = [name for name, is_wrong in wrong.items() if is_wrong]
    if bad:
        shapes = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}
        shapes |= {"mask": mask, "resets": resets}
        seen = ", ".join(f"{n} {list(x.shape)}" for n, x in shapes.items() if x is not None)
        raise ValueError(
            f"{' and '.join(bad)} does not fit: {seen}; wanted q, k [B, T, H', K], v [B, T, H, V], "
            "g, beta [B, T, H], initial_state [B, H, K, V], mask, resets [B, T], none empty, and H "
            "a multiple of H'"
        )
