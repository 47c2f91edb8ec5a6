"""The output gate and the value scale.

Source: arXiv 2606.16429, Phase 1. Shape letters: N sequences, T tokens, H heads, V value dim, D
model dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tc.errors import TCError
from tc.init.dynamics import set_mean
from tc.init.measure import SEQUENCES, batches, outputs, read_out
from tc.stats import LayerBatch
from tc.student.mixer import GatedDeltaNet
from tc.teacher.attention import Attention


@torch.no_grad()
def silence_gate(mixer: GatedDeltaNet) -> None:
    """g_proj = 0: silu(0) = 0, so the layer starts without a word."""
    mixer.g_proj.weight.zero_()


@torch.no_grad()
def open_gate(mixer: GatedDeltaNet, mean_x: torch.Tensor) -> None:
    """g_proj such that every gate's mean logit is 1, where silu is nearly linear and not small.

    A gate that varies around zero multiplies the read-out by noise of either sign, which no linear
    read-out can undo; one that varies around a constant lets it through.

    Args:
        mixer: changed in place.
        mean_x: the mean input over calibration tokens `[D]`.
    """
    weight = mixer.g_proj.weight
    set_mean(weight, mean_x, torch.ones(len(weight), device=weight.device))


@torch.no_grad()
def perturb_gate(
    mixer: GatedDeltaNet, attention: Attention, batch: LayerBatch, gate_rms: float
) -> None:
    """g_proj = alpha W_V, alpha such that the layer's output has `gate_rms` of the teacher's RMS.

    silu(alpha u) is close to alpha u / 2 for small alpha, so a few proportional steps find alpha.

    Args:
        mixer: changed in place.
        attention: the teacher's attention module.
        batch: calibration activations.
        gate_rms: the wanted ratio, from 0 to 1.

    Raises:
        TCError: if no alpha gives that ratio.
    """
    mixer.g_proj.weight.copy_(mixer.v_proj.weight)
    batch = batch[:SEQUENCES]  # an RMS needs no more
    wanted = gate_rms * rms(attention.o_proj(batch.context))
    for _ in range(12):
        ratio = wanted / rms(outputs(mixer, batch)).clamp_min(1e-30)
        mixer.g_proj.weight.mul_(ratio)
        if abs(float(ratio) - 1) < 1e-3:
            return
    raise TCError(
        f"init.gate=perturb: no gate gives init.gate_rms={gate_rms} of the teacher's output in "
        f"layer {mixer.layer_idx}; take a smaller init.gate_rms, or init.gate=fla."
    )


@torch.no_grad()
def scale_values(mixer: GatedDeltaNet, batch: LayerBatch) -> None:
    """Scales head h of W_V by the least-squares factor from its read-out to the teacher's context.

    As the paper states it. The RMSNorm behind the read-out cancels most of it again (SiLU is not
    linear, so not all); `scale_read_out` is the form that does something.
    """
    factor = _factors(mixer, batch, lambda part, o: o)
    mixer.v_proj.weight.unflatten(0, (mixer.num_heads, -1)).mul_(factor[:, None, None])
    if mixer.form.qkv_bias:
        mixer.v_proj.bias.unflatten(0, (mixer.num_heads, -1)).mul_(factor[:, None])


@torch.no_grad()
def scale_read_out(mixer: GatedDeltaNet, batch: LayerBatch) -> None:
    """Scales head h of W_O by the least-squares factor from what it reads to the teacher's context.

    Norm and gate are in the features, so nothing behind them can cancel the factor.
    """
    factor = _factors(mixer, batch, lambda part, o: mixer.features(part.x, o))
    mixer.o_proj.weight.unflatten(1, (mixer.num_heads, -1)).mul_(factor[None, :, None])


def rms(x: torch.Tensor) -> torch.Tensor:
    """Root mean square over everything."""
    return x.double().square().mean().sqrt()


def _factors(
    mixer: GatedDeltaNet,
    batch: LayerBatch,
    student: Callable[[LayerBatch, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """<teacher, student> / <student, student> of each head, `[H]`, summed piece by piece.

    Args:
        mixer: whose read-outs o `[N, T, H, V]` are scaled.
        batch: calibration activations; its contexts are the teacher's.
        student: from a piece and its o to what is scaled, `[N, T, H, V]` or `[N, T, H V]`.
    """
    product = torch.zeros(mixer.num_heads, dtype=torch.float64, device=batch.x.device)
    power = torch.zeros_like(product)
    for part in batches(batch):
        shape = (-1, mixer.num_heads, mixer.head_dim)
        own = student(part, read_out(mixer, part)).reshape(shape).double()
        product += (part.context.reshape(shape).double() * own).sum((0, 2))
        power += own.square().sum((0, 2))
    return (product / power.clamp_min(torch.finfo(torch.float64).tiny)).to(batch.x.dtype)
