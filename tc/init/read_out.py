"""The read-out in closed form: o_proj by ridge regression on the mixer's own features.

With features F `[tokens, H V]` and the teacher's outputs Y `[tokens, D]`,

    W = argmin ||F W^T - Y||^2 + lambda m ||W||^2,    m the mean diagonal of F^T F,

solved from the Gram matrices F^T F and F^T Y, which are streamed in float64. The strength lambda is
the one of the given list with the smallest error on selection tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tc.errors import TCError
from tc.init.measure import batches, features
from tc.stats import LayerBatch
from tc.student.mixer import GatedDeltaNet
from tc.teacher.attention import Attention


@dataclass
class Gram:
    """Sums over tokens, float64: F^T F `[W, W]`, F^T Y `[W, D]` and ||Y||^2."""

    features: torch.Tensor
    cross: torch.Tensor
    power: float

    def error(self, weight: torch.Tensor) -> float:
        """||F W - Y||^2 / ||Y||^2 for `weight` `[W, D]`."""
        fit = (weight * (self.features @ weight - 2 * self.cross)).sum()
        return float(fit) / self.power + 1


@torch.no_grad()
def gram(mixer: GatedDeltaNet, attention: Attention, batch: LayerBatch) -> Gram:
    """Gathers the Gram matrices of a layer; a bias of o_proj is one more constant feature."""
    width = mixer.o_proj.in_features + mixer.form.o_bias
    total = torch.zeros(width, width, dtype=torch.float64, device=batch.x.device)
    cross = total.new_zeros(width, mixer.o_proj.out_features)
    power = 0.0
    for part in batches(batch):
        f = features(mixer, part).flatten(0, 1).double()
        if mixer.form.o_bias:
            f = torch.cat([f, f.new_ones(len(f), 1)], 1)
        y = attention.o_proj(part.context).flatten(0, 1).double()
        total += f.mT @ f
        cross += f.mT @ y
        power += float(y.square().sum())
    return Gram(total, cross, power)


@torch.no_grad()
def solve_read_out(
    mixer: GatedDeltaNet,
    attention: Attention,
    calibration: LayerBatch,
    selection: LayerBatch,
    strengths: list[float],
) -> dict[str, float]:
    """Solves o_proj (and its bias, where it has one) and puts it in place.

    Args:
        mixer: changed in place.
        attention: the teacher's attention module.
        calibration: the tokens that are fitted.
        selection: other tokens, on which the strength is chosen.
        strengths: the values of lambda to try, above 0.

    Returns:
        `ridge`, the chosen strength, and `error`, the relative error on selection tokens.

    Raises:
        TCError: if the features hold NaN or infinity.
    """
    fit, judge = gram(mixer, attention, calibration), gram(mixer, attention, selection)
    if not fit.features.isfinite().all():
        raise TCError(
            f"the mixer of layer {mixer.layer_idx} gives NaN or infinity on calibration tokens; "
            "its read-out cannot be solved. Try init=copy_only, or teacher.dtype=float32."
        )
    values, vectors = torch.linalg.eigh(fit.features)
    mean = float(values.clamp_min(0).mean())
    rotated = vectors.mT @ fit.cross

    def solution(strength: float) -> torch.Tensor:
        return vectors @ (rotated / (values.clamp_min(0) + strength * mean)[:, None])

    errors = {strength: judge.error(solution(strength)) for strength in strengths}
    best = min(errors, key=errors.__getitem__)
    _place(mixer, solution(best))
    return {"ridge": best, "error": errors[best]}


def _place(mixer: GatedDeltaNet, weight: torch.Tensor) -> None:
    width = mixer.o_proj.in_features
    mixer.o_proj.weight.copy_(weight[:width].mT)
    if mixer.form.o_bias:
        mixer.o_proj.bias.copy_(weight[width])
