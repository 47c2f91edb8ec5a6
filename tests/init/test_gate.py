"""Output gate and value scale (fault 8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from init_helpers import TEACHERS, Layer, closeness

from tc.config import OutputGate
from tc.errors import TCError
from tc.init import initialise, relative_error
from tc.init.gate import open_gate, perturb_gate, rms, scale_read_out, scale_values, silence_gate
from tc.init.measure import SEQUENCES, features, outputs, read_out
from tc.stats import LayerBatch
from tc.student.mixer import GatedDeltaNet


def least_squares(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The best factor of each head, one head at a time in float64; `[N, T, H, V]` to `[H]`."""
    columns = (x.double().movedim(2, 0).flatten(1) for x in (student, teacher))
    return torch.stack(
        [
            torch.linalg.lstsq(s[:, None], t[:, None]).solution[0, 0]
            for s, t in zip(*columns, strict=True)
        ]
    )


def by_head(x: torch.Tensor, mixer: GatedDeltaNet) -> torch.Tensor:
    return x.unflatten(-1, (mixer.num_heads, -1))


def test_a_silent_gate_says_nothing(layers) -> None:
    layer = layers("random_qwen3")[0]
    mixer = layer.mixer()
    silence_gate(mixer)
    assert (outputs(mixer, layer.selection) == 0).all()
    assert relative_error(mixer, layer.attention, layer.selection) == 1


@pytest.mark.parametrize("name", TEACHERS)
def test_an_open_gate_varies_around_one(layers, name: str) -> None:
    layer = layers(name)[1]
    mixer, drawn, x = layer.mixer(), layer.mixer(), layer.calibration.x
    open_gate(mixer, x.double().mean((0, 1)))
    logits = mixer.g_proj(x).mean((0, 1))
    torch.testing.assert_close(logits, torch.ones_like(logits), rtol=0, atol=1e-4)
    # As FLA draws it, the mean is another.
    assert (drawn.g_proj(x).mean((0, 1)) - 1).abs().median() > 0.3


@pytest.mark.parametrize("gate_rms", [0.01, 0.5])
@pytest.mark.parametrize("name", TEACHERS)
def test_perturbation_has_the_wanted_size(layers, name: str, gate_rms: float) -> None:
    for layer in layers(name):
        mixer = layer.mixer()
        perturb_gate(mixer, layer.attention, layer.calibration, gate_rms)
        # The size is measured on the first sequences, and holds roughly on the others.
        for batch, rel in ((layer.calibration[:SEQUENCES], 2e-3), (layer.selection, 0.2)):
            teacher = layer.attention.o_proj(batch.context)
            ratio = float(rms(outputs(mixer, batch)) / rms(teacher))
            assert ratio == pytest.approx(gate_rms, rel=rel)
        direction = torch.nn.functional.cosine_similarity(
            mixer.g_proj.weight.flatten(), mixer.v_proj.weight.flatten(), 0
        )
        assert direction == pytest.approx(1, abs=1e-5)


def test_a_layer_that_says_nothing_cannot_be_matched(layers) -> None:
    layer = layers("random_llama")[0]
    mixer = layer.mixer()
    mixer.v_proj.weight.zero_()
    with pytest.raises(TCError, match=r"init\.gate_rms=0\.01.*layer 0"):
        perturb_gate(mixer, layer.attention, layer.calibration, 0.01)


@pytest.mark.parametrize("name", TEACHERS)
def test_value_scale_is_the_least_squares_factor(layers, name: str) -> None:
    layer = layers(name)[1]
    mixer, before = layer.mixer(), layer.mixer()
    want = least_squares(
        read_out(before, layer.calibration), by_head(layer.calibration.context, mixer)
    )
    scale_values(mixer, layer.calibration)
    names = ["weight", "bias"] if mixer.form.qkv_bias else ["weight"]
    for which in names:
        old, new = (getattr(m.v_proj, which).unflatten(0, (len(want), -1)) for m in (before, mixer))
        scaled = old.double() * want.view(-1, *(1,) * (old.dim() - 1))
        torch.testing.assert_close(new.double(), scaled, rtol=1e-4, atol=1e-6)
        # Wrong on purpose: the factors of other heads.
        wrong = old.double() * want.flip(0).view(-1, *(1,) * (old.dim() - 1))
        assert not torch.allclose(new.double(), wrong, rtol=1e-2)


@pytest.mark.parametrize("name", TEACHERS)
def test_read_out_scale_is_the_least_squares_factor(layers, name: str) -> None:
    layer = layers(name)[1]
    mixer, before = layer.mixer(), layer.mixer()
    student = by_head(features(before, layer.calibration), mixer)
    teacher = by_head(layer.calibration.context, mixer)
    want = least_squares(student, teacher)
    scale_read_out(mixer, layer.calibration)
    columns = (m.o_proj.weight.double().unflatten(1, (len(want), -1)) for m in (before, mixer))
    old, new = columns
    torch.testing.assert_close(new, old * want[None, :, None], rtol=1e-4, atol=1e-6)
    # No other factor of a head fits better.
    for factor in (0.9, 1.1):
        for h in range(len(want)):
            s, t = student[..., h, :].double() * want[h], teacher[..., h, :]
            assert closeness(s, t) < closeness(s * factor, t)


def power(x: torch.Tensor) -> torch.Tensor:
    """Mean square of each head, `[H]`."""
    return x.double().square().mean((0, 1, 3))


def loud(layer: Layer) -> GatedDeltaNet:
    """A mixer with a gate of full size."""
    mixer = layer.mixer()
    perturb_gate(mixer, layer.attention, layer.calibration, 1.0)
    return mixer


def test_the_norm_cancels_a_value_scale_but_not_a_read_out_scale(layers) -> None:
    """A teacher that is this very mixer but for a factor of each head."""
    layer = layers("random_llama")[1]
    factor = torch.tensor([0.5, 0.7, 3.0, 10.0])
    said = by_head(features(loud(layer), layer.calibration), loud(layer)) * factor[:, None]
    batch = LayerBatch(layer.calibration.x, said.flatten(-2), layer.calibration.starts)

    mixer = loud(layer)
    assert relative_error(mixer, layer.attention, batch) > 0.5
    scale_read_out(mixer, batch)
    assert relative_error(mixer, layer.attention, batch) < 1e-9

    # As published: the same factors in W_V, in front of the norm.
    mixer = loud(layer)
    before, inside = features(mixer, batch), read_out(mixer, batch)
    mixer.v_proj.weight.unflatten(0, (4, -1)).mul_(factor[:, None, None])
    loss = relative_error(mixer, layer.attention, batch)
    assert loss > 0.5
    after = by_head(features(mixer, batch), mixer)
    change = power(after) / power(by_head(before, mixer))
    read = power(read_out(mixer, batch)) / power(inside)
    assert ((change > 0.8) & (change < 1.25)).all()
    assert read[0] < 0.4 and read[3] > 25


@pytest.mark.parametrize("name", TEACHERS)
def test_phase1_is_better_than_silence_and_the_papers_is_not(layers, presets, name: str) -> None:
    def gain(preset: str) -> float:
        """How far the layers' errors are below a silent layer's, which is 1, on average."""
        errors = []
        for layer in layers(name):
            mixer = layer.mixer()
            initialise(mixer, layer.attention, layer.statistics, layer.parts, presets[preset])
            errors.append(relative_error(mixer, layer.attention, layer.calibration))
        return 1 - sum(errors) / len(errors)

    # A random teacher attends broadly, to which a decaying memory can only come so close.
    ours, papers = gain("phase1"), gain("paper")
    assert ours > 2 * papers and ours > 0.002
    assert abs(papers) < 0.01
    assert gain("zero_gate") == 0


def test_phase1_scale_makes_up_for_a_small_gate(layers, presets) -> None:
    """Whatever the gate's first size, the scale behind it gives the same output in the end."""
    layer = layers("random_qwen3")[2]
    said = []
    for gate_rms in (0.001, 0.01):
        mixer = layer.mixer()
        cfg = replace(presets["phase1"], gate=OutputGate.perturb, gate_rms=gate_rms)
        initialise(mixer, layer.attention, layer.statistics, layer.parts, cfg)
        said.append(outputs(mixer, layer.selection))
    assert closeness(*said) < 0.01
    assert rms(said[0]) > 0.05 * rms(layer.attention.o_proj(layer.selection.context))
