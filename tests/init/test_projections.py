"""A mixer carries its teacher's projections, head by head (faults 1, 2 and 3).

Shape letters: H query heads, J key/value heads, K head dim, D model dim.
"""

from __future__ import annotations

import pytest
import torch
from init_helpers import TEACHERS, Layer, calibrated, closeness

from tc.config import StudentConfig
from tc.init import form_of
from tc.init.measure import outputs
from tc.init.projections import expand_heads

FORMS = {
    "random_llama": (False, False, False),
    "random_mistral": (False, False, False),
    "random_qwen2": (True, False, False),
    "random_qwen3": (False, False, True),
    "random_qwen3_moe": (False, False, True),
}


def heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    return x.unflatten(-1, (-1, head_dim))


@pytest.mark.parametrize("trailing", [(5,), ()], ids=["weight", "bias"])
def test_whole_heads_are_repeated_not_rows(trailing: tuple[int, ...]) -> None:
    H, J, K = 6, 2, 4
    weight = torch.randn(J * K, *trailing)
    got = expand_heads(weight, H, K)
    want = torch.cat([weight[(h // 3) * K : (h // 3 + 1) * K] for h in range(H)])
    assert torch.equal(got, want)
    # Wrong on purpose: the published code's rows 0, 0, 0, 1 for head 0.
    assert not torch.equal(got, weight.repeat_interleave(H // J, 0))
    assert not torch.equal(got, weight.repeat(H // J, *(1 for _ in trailing)))


def test_without_groups_nothing_is_repeated() -> None:
    weight = torch.randn(8, 5)
    assert torch.equal(expand_heads(weight, 2, 4), weight)


@pytest.mark.parametrize("name", TEACHERS)
def test_every_head_projects_as_its_teacher_head(layers, name: str) -> None:
    for layer in layers(name):
        attention, mixer, x = layer.attention, layer.mixer(), layer.selection.x
        K = attention.head_dim
        torch.testing.assert_close(mixer.q_proj(x), attention.q_proj(x))
        torch.testing.assert_close(
            mixer.o_proj(layer.selection.context), attention.o_proj(layer.selection.context)
        )
        for which in ("k_proj", "v_proj"):
            student = heads(getattr(mixer, which)(x), K)
            teacher = heads(getattr(attention, which)(x), K)
            group = student.shape[-2] // teacher.shape[-2]
            assert student.shape[-2] == mixer.num_heads and group > 1
            for h in range(mixer.num_heads):
                torch.testing.assert_close(student[..., h, :], teacher[..., h // group, :])


@pytest.mark.parametrize("name", TEACHERS)
def test_the_row_wise_fault_changes_the_output(layers, name: str) -> None:
    layer = layers(name)[1]
    right, wrong = layer.mixer(), layer.mixer()
    for which in ("k_proj", "v_proj"):
        weight = getattr(layer.attention, which).weight
        group = wrong.num_heads * wrong.head_dim // len(weight)
        getattr(wrong, which).weight.copy_(weight.repeat_interleave(group, 0))
    right, wrong = (outputs(mixer, layer.selection) for mixer in (right, wrong))
    assert closeness(wrong, right) > 0.05


@pytest.mark.parametrize("name", TEACHERS)
def test_form_follows_the_teacher(layers, name: str) -> None:
    attention = layers(name)[0].attention
    form = form_of(attention, StudentConfig(), "chunk")
    assert (form.qkv_bias, form.o_bias, form.qk_norm) == FORMS[name]
    assert form.use_gate and form.backend == "chunk" and form.is_fla == (not any(FORMS[name]))
    plain = form_of(attention, StudentConfig(carry_bias=False, carry_qk_norm=False), "auto")
    assert plain.is_fla


def bias_of_heads(layer: Layer, which: str) -> torch.Tensor:
    bias = getattr(layer.attention, which).bias.unflatten(0, (-1, layer.attention.head_dim))
    group = layer.mixer().num_heads // len(bias)
    return torch.cat([bias[h // group] for h in range(layer.mixer().num_heads)])


def test_qwen2_biases_are_carried(layers) -> None:
    layer = layers("random_qwen2")[1]
    mixer, dropped = layer.mixer(), layer.mixer(carry_bias=False)
    for which in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(getattr(mixer, which).bias, bias_of_heads(layer, which))
        assert getattr(dropped, which).bias is None
    assert closeness(outputs(dropped, layer.selection), outputs(mixer, layer.selection)) > 0.01


def test_a_bias_of_the_output_is_carried(tmp_path) -> None:
    layer = calibrated("random_llama", tmp_path, "+teacher.model.attention_bias=true")[1]
    mixer = layer.mixer()
    assert mixer.form.o_bias and mixer.form.qkv_bias
    assert torch.equal(mixer.o_proj.bias, layer.attention.o_proj.bias) and mixer.o_proj.bias.any()
    assert torch.equal(mixer.v_proj.bias, bias_of_heads(layer, "v_proj"))


@pytest.mark.parametrize("name", ["random_qwen3", "random_qwen3_moe"])
def test_qwen3_head_norms_are_carried(layers, name: str) -> None:
    layer = layers(name)[1]
    mixer, dropped = layer.mixer(), layer.mixer(carry_qk_norm=False)
    for which in ("q_norm", "k_norm"):
        q = heads(layer.attention.q_proj(layer.selection.x), mixer.head_dim)
        torch.testing.assert_close(getattr(mixer, which)(q), getattr(layer.attention, which)(q))
    assert closeness(outputs(dropped, layer.selection), outputs(mixer, layer.selection)) > 0.01


def test_epsilon_of_the_head_norms_is_the_teachers(tmp_path) -> None:
    layer = calibrated("random_qwen3", tmp_path, "+teacher.model.rms_norm_eps=0.5")[0]
    q = heads(layer.attention.q_proj(layer.selection.x), 16)
    torch.testing.assert_close(layer.mixer().q_norm(q), layer.attention.q_norm(q))


@pytest.mark.parametrize("name", ["random_qwen3", "random_qwen3_moe"])
def test_heads_wider_than_hidden_over_heads(layers, name: str) -> None:
    layer = layers(name)[0]
    mixer = layer.mixer()
    D = layer.selection.x.shape[-1]
    assert mixer.head_dim == layer.attention.head_dim != D // mixer.num_heads
    assert mixer.q_proj.weight.shape == (mixer.num_heads * mixer.head_dim, D)
    assert outputs(mixer, layer.selection).shape == layer.selection.x.shape
