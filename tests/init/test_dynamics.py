"""Half-lives that halve, and write gates whose mean moves (faults 6 and 7)."""

from __future__ import annotations

import math

import pytest
import torch
from init_helpers import TEACHERS

from tc.config import Sinks
from tc.init.dynamics import (
    centre_rows,
    concentrations,
    half_lives,
    set_decay,
    set_mean,
    set_write_gate,
)
from tc.stats import AttentionStatistics
from tc.student.mixer import GatedDeltaNet, MixerForm

H, K, D = 4, 8, 12
DISTANCES = torch.tensor([0.5, 2.0, 8.0, 64.0], dtype=torch.float64)


def fresh(backend: str = "auto") -> GatedDeltaNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mixer = GatedDeltaNet(D, H, K, 0, MixerForm(backend=backend))
    return mixer.requires_grad_(False)


def inputs(T: int = 50) -> torch.Tensor:
    return torch.randn(3, T, D, generator=torch.Generator().manual_seed(2)) + 0.4


def left_after(mixer: GatedDeltaNet, num_tokens: int) -> torch.Tensor:
    """The share of a state that is left of each head after tokens that write nothing, `[H]`."""
    state = torch.randn(1, H, K, K, generator=torch.Generator().manual_seed(3))
    # x = 0: k and v are zero, so the state only decays.
    nothing = torch.zeros(1, num_tokens, D)
    _, after = mixer.read_out(nothing, state=state, output_final_state=True)
    return ((after * state).sum((0, 2, 3)) / state.square().sum((0, 2, 3))).double()


@pytest.mark.parametrize("backend", ["loop", "chunk"])
def test_memory_halves_after_d_tokens(backend: str) -> None:
    mixer = fresh(backend)
    set_decay(mixer, DISTANCES)
    assert (mixer.A_log == 0).all()
    for num_tokens in (1, 8, 64):
        want = 0.5 ** (num_tokens / DISTANCES)
        torch.testing.assert_close(left_after(mixer, num_tokens), want, rtol=1e-4, atol=1e-7)


def test_a_half_life_without_ln_2_does_not_halve() -> None:
    mixer = fresh()
    set_decay(mixer, DISTANCES * math.log(2))  # wrong on purpose: 1 / d in place of ln 2 / d
    assert ((left_after(mixer, 8) - 0.5 ** (8 / DISTANCES)).abs() > 1e-4)[1:].all()


def test_first_write_is_half_forgotten_after_d_tokens() -> None:
    mixer, x = fresh(), torch.zeros(1, 9, D)
    x[:, 0] = inputs()[0, 0]
    set_decay(mixer, DISTANCES)
    mixer.a_proj.weight.zero_()
    _, first = mixer.read_out(x[:, :1], output_final_state=True)
    _, last = mixer.read_out(x, output_final_state=True)
    share = (last.norm(dim=(2, 3)) / first.norm(dim=(2, 3)))[0].double()
    torch.testing.assert_close(share, 0.5 ** (8 / DISTANCES), rtol=1e-4, atol=1e-7)


def test_centred_rows_have_no_mean_and_keep_their_spread() -> None:
    mixer, x = fresh(), inputs()
    before, mean = mixer.a_proj(x), x.mean((0, 1))
    assert before.mean((0, 1)).abs().min() > 1e-3
    centre_rows(mixer, mean)
    after = mixer.a_proj(x)
    torch.testing.assert_close(after.mean((0, 1)), torch.zeros(H), rtol=0, atol=1e-6)
    # Rank one: inputs that are orthogonal to the mean see no change at all.
    flat = x - (x @ mean)[..., None] * mean / mean.square().sum()
    torch.testing.assert_close(mixer.a_proj(flat), fresh().a_proj(flat), rtol=1e-5, atol=1e-6)


def test_write_gate_moves_the_mean_logit_to_its_target() -> None:
    mixer, x, c = fresh(), inputs(), torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64)
    mean, before = x.mean((0, 1)), fresh().b_proj(x)
    set_write_gate(mixer, 0.3 + 0.4 * c, mean)
    after, target = mixer.b_proj(x), torch.logit(0.3 + 0.4 * c).float()
    torch.testing.assert_close(after.mean((0, 1)), target, rtol=1e-5, atol=1e-6)
    change = mixer.b_proj.weight - fresh().b_proj.weight
    along = change @ mean / mean.norm()
    torch.testing.assert_close(change, along[:, None] * mean / mean.norm(), rtol=1e-4, atol=1e-6)
    flat = x - (x @ mean)[..., None] * mean / mean.square().sum()
    torch.testing.assert_close(mixer.b_proj(flat), fresh().b_proj(flat), rtol=1e-5, atol=1e-6)

    # Wrong on purpose, as published: the rows rescaled, which changes the spread about a mean of 0.
    centred = before - before.mean((0, 1))
    rescaled = centred * (target.abs() / centred.std((0, 1)))
    torch.testing.assert_close(
        rescaled.sigmoid().mean((0, 1)), torch.full((H,), 0.5), atol=0.03, rtol=0
    )
    assert (after.sigmoid().mean((0, 1))[[0, 3]] - 0.5).abs().min() > 0.1


@pytest.mark.parametrize("name", TEACHERS)
def test_write_gate_on_a_teachers_own_inputs(layers, name: str) -> None:
    for layer in layers(name):
        mixer, x = layer.mixer(), layer.calibration.x
        c = concentrations(layer.statistics, Sinks.drop)
        set_write_gate(mixer, 0.3 + 0.4 * c, x.mean((0, 1)))
        got = mixer.b_proj(x).double().mean((0, 1)).sigmoid()
        torch.testing.assert_close(got, 0.3 + 0.4 * c, rtol=1e-4, atol=1e-5)


def test_a_target_may_be_on_another_device_than_the_weight() -> None:
    """Statistics are read to the CPU, and mixers are where the run computes."""
    weight = torch.zeros(H, D, device="meta")
    set_mean(weight, torch.ones(D, device="meta"), torch.zeros(H))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dynamics_on_a_gpu() -> None:
    mixer, x = fresh("loop").cuda(), inputs().cuda()
    c = torch.full((H,), 0.25, dtype=torch.float64)
    set_decay(mixer, DISTANCES)
    centre_rows(mixer, x.double().mean((0, 1)))
    set_write_gate(mixer, 0.3 + 0.4 * c, x.double().mean((0, 1)))
    got = mixer.b_proj(x).double().mean((0, 1)).sigmoid().cpu()
    torch.testing.assert_close(got, 0.3 + 0.4 * c, rtol=1e-4, atol=1e-5)


def test_concentration_is_one_minus_min_max_of_the_entropy() -> None:
    statistics = {
        "entropy": torch.tensor([1.0, 3.0, 2.0]).double(),
        "free_entropy": torch.tensor([0.9, 0.1, 0.3]).double(),
    }
    assert concentrations(statistics, Sinks.keep).tolist() == [1.0, 0.0, 0.5]
    torch.testing.assert_close(
        concentrations(statistics, Sinks.drop), torch.tensor([0.0, 1.0, 0.75]).double()
    )


@pytest.mark.parametrize("value", [0.0, 0.7])
def test_heads_that_are_all_alike_are_neither_broad_nor_sharp(value: float) -> None:
    alike = {"free_entropy": torch.full((3,), value).double()}
    assert concentrations(alike, Sinks.drop).tolist() == [0.5, 0.5, 0.5]


def test_half_life_has_a_floor_and_no_ceiling() -> None:
    statistics = {
        "distance": torch.tensor([0.0, 5000.0]).double(),
        "free_distance": torch.tensor([3.0, 0.1]).double(),
    }
    assert half_lives(statistics, Sinks.keep).tolist() == [0.5, 5000.0]
    assert half_lives(statistics, Sinks.drop).tolist() == [3.0, 0.5]
    assert half_lives(statistics, Sinks.keep, 0.25).tolist() == [0.5, 1250.0]


def sink_heavy(T: int) -> dict[str, torch.Tensor]:
    """Three heads with p_tj proportional to exp(j - t); the last two rest on token 0 as well."""
    t = torch.arange(T, dtype=torch.float32)
    one, zero = torch.ones(T), torch.zeros(T)
    q = torch.stack([one, t, one], -1).expand(1, 3, T, 3)
    k = torch.stack([t, zero, zero], -1).repeat(1, 3, 1, 1)
    for h, sink in enumerate((-5.0, 0.0, 3.0)):
        k[0, h, 0] = torch.tensor([0.0, 1.0, sink])  # a score of t + sink, however far t is
    statistics = AttentionStatistics(1, 3)
    statistics.add(0, q, k, None, 1.0)
    return {name: value[0] for name, value in statistics.means().items()}


def test_a_sink_is_no_distance() -> None:
    statistics = sink_heavy(96)
    assert statistics["sink_mass"][1] > 0.3 and statistics["sink_mass"][2] > 0.8
    kept, dropped = (half_lives(statistics, sinks) for sinks in (Sinks.keep, Sinks.drop))
    # All three look equally far; the plain mean distance takes the sink for half a window.
    assert dropped.max() < 1.3 * dropped.min() < 2
    assert kept[0] < 2 and kept[1] > 10 and kept[2] > 35


def test_normalised_entropy_lies_between_zero_and_one(layers) -> None:
    for name in TEACHERS:
        for layer in layers(name):
            entropy = layer.statistics["free_entropy"]
            assert entropy.min() >= 0 and entropy.max() <= 1 < layer.statistics["entropy"].max()
