"""The closed-form read-out against ridge regression on matrices that are held whole."""

from __future__ import annotations

import math

import pytest
import torch
from init_helpers import TEACHERS, Layer, calibrated

from tc.errors import TCError
from tc.init import relative_error, solve_read_out
from tc.init.measure import features
from tc.init.read_out import gram
from tc.stats import LayerBatch
from tc.student.mixer import GatedDeltaNet

STRENGTHS = [1e-4, 1e-2, 1.0, 100.0]


def whole(
    layer: Layer, mixer: GatedDeltaNet, batch: LayerBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (with a constant one for a bias) and the teacher's outputs, float64."""
    f = features(mixer, batch).flatten(0, 1).double()
    if mixer.o_proj.bias is not None:
        f = torch.cat([f, torch.ones(len(f), 1)], 1)
    return f, layer.attention.o_proj(batch.context).flatten(0, 1).double()


def ridge(f: torch.Tensor, y: torch.Tensor, strength: float) -> torch.Tensor:
    """Least squares with sqrt(lambda m) I below the features: no Gram matrix, no eigenvectors."""
    m = f.square().sum(0).mean()
    below = (strength * m).sqrt() * torch.eye(f.shape[1], dtype=f.dtype)
    target = torch.cat([y, y.new_zeros(f.shape[1], y.shape[1])])
    return torch.linalg.lstsq(torch.cat([f, below]), target, driver="gelsd").solution


def solved(mixer: GatedDeltaNet) -> torch.Tensor:
    bias = [] if mixer.o_proj.bias is None else [mixer.o_proj.bias[None]]
    return torch.cat([mixer.o_proj.weight.mT, *bias]).double()


@pytest.fixture(scope="module")
def with_bias(tmp_path_factory: pytest.TempPathFactory) -> Layer:
    folder = tmp_path_factory.mktemp("bias")
    return calibrated("random_llama", folder, "+teacher.model.attention_bias=true")[1]


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("name", [*TEACHERS, "bias"])
def test_equals_least_squares(layers, with_bias, name: str, strength: float) -> None:
    layer = with_bias if name == "bias" else layers(name)[1]
    mixer = layer.mixer()
    assert mixer.form.o_bias == (name == "bias")
    f, y = whole(layer, mixer, layer.calibration)
    solve_read_out(mixer, layer.attention, layer.calibration, layer.selection, [strength])
    want, got = ridge(f, y, strength), solved(mixer)
    assert (got - want).norm() < 1e-5 * want.norm()
    # Wrong on purpose: a strength that is not relative to the features' own size.
    absolute = torch.linalg.solve(f.mT @ f + strength * torch.eye(f.shape[1]), f.mT @ y)
    assert (got - absolute).norm() > 1e-4 * want.norm()


def test_a_bias_is_needed_where_the_teacher_has_one(with_bias) -> None:
    errors = []
    for carry in (True, False):
        mixer = with_bias.mixer(carry_bias=carry)
        solve_read_out(
            mixer, with_bias.attention, with_bias.calibration, with_bias.selection, [1e-3]
        )
        errors.append(relative_error(mixer, with_bias.attention, with_bias.calibration))
    assert errors[0] < errors[1]


@pytest.mark.parametrize("name", ["random_qwen2", "bias"])
def test_the_grams_error_is_the_relative_error(layers, with_bias, name: str) -> None:
    layer = with_bias if name == "bias" else layers(name)[2]
    mixer = layer.mixer()
    f, y = whole(layer, mixer, layer.selection)
    held = gram(mixer, layer.attention, layer.selection)
    torch.testing.assert_close(held.features, f.mT @ f)
    torch.testing.assert_close(held.cross, f.mT @ y)
    weights = torch.randn(f.shape[1], y.shape[1], generator=torch.Generator().manual_seed(1))
    for weight in (solved(mixer), weights.double(), torch.zeros_like(weights).double()):
        want = float((f @ weight - y).square().sum() / y.square().sum())
        assert held.error(weight) == pytest.approx(want, rel=1e-9)
    assert held.error(solved(mixer)) == pytest.approx(
        relative_error(mixer, layer.attention, layer.selection), rel=1e-5
    )


@pytest.mark.parametrize("name", TEACHERS)
def test_strength_is_the_best_on_selection_tokens(layers, name: str) -> None:
    layer = layers(name)[1]
    few = layer.calibration[:2]  # so few that a weak ridge fits them by heart
    mixer = layer.mixer()
    f, y = whole(layer, mixer, few)
    g, z = whole(layer, mixer, layer.selection)
    fits = {s: ridge(f, y, s) for s in STRENGTHS}
    on_selection = {
        s: float((g @ w - z).square().sum() / z.square().sum()) for s, w in fits.items()
    }
    on_calibration = {s: float((f @ w - y).square().sum()) for s, w in fits.items()}
    info = solve_read_out(mixer, layer.attention, few, layer.selection, STRENGTHS)
    assert info["ridge"] == min(on_selection, key=on_selection.__getitem__)
    assert info["ridge"] != min(on_calibration, key=on_calibration.__getitem__)
    assert info["error"] == pytest.approx(min(on_selection.values()), rel=1e-6)
    found = relative_error(mixer, layer.attention, layer.selection)
    assert found == pytest.approx(info["error"], rel=1e-4)


def test_order_of_the_strengths_does_not_matter(layers) -> None:
    layer = layers("random_llama")[0]
    results = []
    for strengths in (STRENGTHS, STRENGTHS[::-1]):
        mixer = layer.mixer()
        parts = (layer.calibration, layer.selection)
        results.append((solve_read_out(mixer, layer.attention, *parts, strengths), solved(mixer)))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


def test_a_teacher_within_reach_is_reached(layers) -> None:
    """Where the teacher's output is linear in the features, nothing is left of the error."""
    layer = layers("random_qwen3")[1]
    mixer = layer.mixer()
    parts = [LayerBatch(b.x, features(mixer, b), b.starts) for b in layer.parts.values()]
    mixer.o_proj.weight.zero_()
    info = solve_read_out(mixer, layer.attention, *parts, [1e-9])
    assert info["error"] < 1e-6 and info["error"] == pytest.approx(0, abs=1e-6)
    assert relative_error(mixer, layer.attention, parts[1]) < 1e-6


def test_what_is_not_finite_is_an_error(layers) -> None:
    layer = layers("random_llama")[2]
    mixer = layer.mixer()
    mixer.g_proj.weight[0, 0] = math.nan
    with pytest.raises(TCError, match="layer 2 gives NaN or infinity"):
        solve_read_out(mixer, layer.attention, layer.calibration, layer.selection, STRENGTHS)
