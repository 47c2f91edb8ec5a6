"""Inputs of the gated delta rule, and how two results are compared.

Shape letters: B batch, T tokens, H heads, J query/key heads, K key dim, V value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tc.student.ops import gated_delta_rule

Tensors = dict[str, torch.Tensor]
INPUTS = ("q", "k", "v", "g", "beta", "initial_state")


def rel_rms(x: torch.Tensor, truth: torch.Tensor) -> float:
    """RMS of the difference over that of the truth; by itself where float32 has no such truth."""
    x, truth = x.detach().double().cpu(), truth.detach().double().cpu()
    assert x.shape == truth.shape
    error, size = ((y.square().mean()).sqrt().item() for y in (x - truth, truth))
    return error / size if size > torch.finfo(torch.float32).tiny else error


def worst(x: Tensors, truth: Tensors) -> tuple[float, str]:
    """The largest relative error and where it is; NaN counts as the largest."""
    assert x.keys() == truth.keys()
    errors = {name: rel_rms(x[name], truth[name]) for name in truth}
    return max((error if error == error else float("inf"), name) for name, error in errors.items())


def make(
    T: int,
    K: int = 8,
    V: int = 16,
    B: int = 2,
    H: int = 2,
    J: int = 2,
    g: float | None = None,
    beta: float | None = None,
    repeated_keys: bool = False,
    seed: int = 0,
) -> Tensors:
    """Random float32 inputs with an initial state; `g` and `beta` fix all of theirs."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    k = normal(B, 1, J, K).expand(B, T, J, K) if repeated_keys else normal(B, T, J, K)
    decay, strength = -F.softplus(normal(B, T, H) - 2), normal(B, T, H).sigmoid()
    return {
        "q": normal(B, T, J, K),
        "k": k.clone(),
        "v": normal(B, T, H, V),
        "g": decay if g is None else torch.full_like(decay, g),
        "beta": strength if beta is None else torch.full_like(strength, beta),
        "initial_state": normal(B, H, K, V),
    }


def run(
    inputs: Tensors,
    dtype: torch.dtype,
    backend: str,
    device: str = "cpu",
    rule=gated_delta_rule,
    **options,
) -> Tensors:
    """Output, final state, and the gradient of every input under fixed random cotangents."""
    # Decay, write strength and state stay in float32 at least, as the mixer hands them over.
    wide = torch.promote_types(dtype, torch.float32)
    cast = {n: x.to(device, dtype if n in "qkv" else wide, copy=True) for n, x in inputs.items()}
    for x in cast.values():
        x.requires_grad_()
    options = {n: x.to(device) if torch.is_tensor(x) else x for n, x in options.items()}
    options.setdefault("use_qk_l2norm_in_kernel", True)
    o, state = rule(**cast, output_final_state=True, backend=backend, **options)
    draw = torch.Generator().manual_seed(1)
    loss = sum((y.double().cpu() * torch.randn(y.shape, generator=draw)).sum() for y in (o, state))
    loss.backward()
    return {"o": o, "state": state, **{f"d{n}": x.grad for n, x in cast.items()}}


def random_resets(B: int, T: int, seed: int = 0) -> torch.Tensor:
    """Documents of about nine tokens, one of which begins on a chunk's first token."""
    resets = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < 1 / 9
    resets[0, 64:65] = True
    return resets
