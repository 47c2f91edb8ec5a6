"""The optimizer of two parts, who gets which rate, and the schedules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tc.config import OptimizerKind, Schedule
from tc.optim import MuonAdamW, parameter_groups, rate_factor
from tc.student.mixer import GatedDeltaNet, MixerForm


def mixer() -> GatedDeltaNet:
    torch.manual_seed(0)
    return GatedDeltaNet(12, 2, 4, 0, MixerForm(qkv_bias=True, qk_norm=True))


def trained(module: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    for step in range(3):
        x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(step))
        module(x)[0].square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_it_is_muon_for_matrices_and_adamw_for_the_rest() -> None:
    one, two = mixer(), mixer()
    both = MuonAdamW(
        parameter_groups(one.named_parameters(), OptimizerKind.muon, 0.1, lambda name: 0.01)
    )
    own = [two.q_proj, two.k_proj, two.v_proj, two.o_proj, two.g_proj]
    matrices = [module.weight for module in own]
    ids = {id(p) for p in matrices}
    small = [two.a_proj.weight, two.b_proj.weight]
    vectors = [p for p in two.parameters() if p.dim() == 1]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": small, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=0.01
    )
    assert len(ids) + len(small) + len(vectors) == len(list(two.parameters()))
    for a, b in zip(trained(one, both).values(), trained(two, muon, adamw).values(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.q_proj.weight, mixer().q_proj.weight)


def test_its_state_can_be_taken_over_parameter_by_parameter() -> None:
    def optimizer(module: nn.Module) -> MuonAdamW:
        named = module.named_parameters()
        return MuonAdamW(parameter_groups(named, OptimizerKind.muon, 0.0, lambda name: 0.01))

    one = mixer()
    first = optimizer(one)
    trained(one, first)
    two = copy.deepcopy(one)
    second = optimizer(two)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        second.state[b] = {k: v.clone() for k, v in first.state[a].items()}
    fresh = trained(copy.deepcopy(one), optimizer(copy.deepcopy(one)))
    ahead, same = trained(one, first), trained(two, second)
    assert all(torch.equal(ahead[name], same[name]) for name in ahead)
    assert not all(torch.equal(ahead[name], fresh[name]) for name in ahead)


def test_a_schedule_turns_the_rates_of_both_parts() -> None:
    module = mixer()
    named = module.named_parameters()
    optimizer = MuonAdamW(parameter_groups(named, OptimizerKind.muon, 0.0, lambda name: 0.01))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    trained(module, optimizer)
    before = copy.deepcopy(module.state_dict())
    schedule.step()
    trained(module, optimizer)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_vectors_are_never_decayed_and_rates_go_by_name() -> None:
    module = mixer()
    names = {id(p): name for name, p in module.named_parameters()}
    groups = parameter_groups(
        module.named_parameters(),
        OptimizerKind.adamw,
        0.1,
        lambda name: 1e-3 if "q" in name else 2e-3,
    )
    for group in groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.1 if parameter.dim() >= 2 else 0.0)
            assert group["lr"] == (1e-3 if "q" in names[id(parameter)] else 2e-3)
            assert not group["muon"]
    assert sum(len(group["params"]) for group in groups) == len(names)


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Schedule.constant, [1, 1, 1, 1]),
        (Schedule.cosine, [1, 0.5, 0.146447, 0]),
        (Schedule.wsd, [1, 1, 1, 0]),
    ],
)
def test_schedules(schedule: Schedule, values: list[float]) -> None:
    done = [0, 500, 750, 1000]
    assert [rate_factor(schedule, d, 1000) for d in done] == pytest.approx(values, abs=1e-6)


def test_wsd_decays_over_its_share_and_warm_up_is_in_tokens() -> None:
    assert rate_factor(Schedule.wsd, 900, 1000, decay_share=0.2) == pytest.approx(0.5)
    assert rate_factor(Schedule.constant, 0, 1000, warmup=100, size=10) == pytest.approx(0.1)
    # The rate at a token does not depend on how many tokens a step has.
    for size in (10, 50):
        assert rate_factor(Schedule.constant, 100 - size, 1000, 100, size=size) == 1
