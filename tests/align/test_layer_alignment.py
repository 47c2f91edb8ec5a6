"""What is trained, how fast, and what stays outside (faults 9 and 11)."""

from __future__ import annotations

import math

import pytest
import torch
from align_helpers import TEACHERS, Task, settings
from torch import nn

from tc.align.module import LayerAlignment, groups_of
from tc.config import OptimizerKind, Schedule
from tc.errors import TCError
from tc.student.mixer import GatedDeltaNet, MixerForm

EVERYTHING = MixerForm(qkv_bias=True, o_bias=True, qk_norm=True)


def mixer_of(form: MixerForm) -> GatedDeltaNet:
    return GatedDeltaNet(12, 2, 4, 0, form)


@pytest.mark.parametrize("form", [MixerForm(), MixerForm(use_gate=False), EVERYTHING])
def test_weight_decay_is_on_matrices_alone(form: MixerForm) -> None:
    mixer = mixer_of(form)
    groups = groups_of(torch.nn.ModuleList([mixer]), settings(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    names = dict(mixer.named_parameters())
    assert sum(len(group["params"]) for group in groups) == len(names) == len(decay)
    spared = {name for name, p in names.items() if decay[id(p)] == 0}
    assert spared == {n for n in names if not n.endswith("proj.weight")}
    assert {"A_log", "dt_bias", "o_norm.weight"} <= spared
    assert {decay[id(p)] for n, p in names.items() if n not in spared} == {0.1}


def test_two_learning_rates() -> None:
    mixer = mixer_of(EVERYTHING)
    groups = groups_of(
        torch.nn.ModuleList([mixer]), settings(lr_projections=1e-4, lr_dynamics=1e-3)
    )
    lr = {id(p): group["lr"] for group in groups for p in group["params"]}
    slow = {n for n, p in mixer.named_parameters() if lr[id(p)] == 1e-4}
    assert slow == {f"{n}_proj.{kind}" for n in "qkvo" for kind in ("weight", "bias")}
    assert set(lr.values()) == {1e-4, 1e-3}


def test_muons_rate_is_for_the_matrices_that_it_trains() -> None:
    mixer = mixer_of(EVERYTHING)
    groups = groups_of(
        torch.nn.ModuleList([mixer]),
        settings(optimizer=OptimizerKind.muon, lr_projections=1e-2, lr_dynamics=1e-3),
    )
    lr = {id(p): group["lr"] for group in groups for p in group["params"]}
    fast = {n for n, p in mixer.named_parameters() if lr[id(p)] == 1e-2}
    assert fast == {f"{n}_proj.weight" for n in "qkvog"}
    assert all(p.dim() == 2 for group in groups if group["muon"] for p in group["params"])
    assert set(lr.values()) == {1e-2, 1e-3}


def test_one_learning_rate_loses_no_parameter() -> None:
    mixer = mixer_of(EVERYTHING)
    groups = groups_of(
        torch.nn.ModuleList([mixer]), settings(lr_projections=1e-3, lr_dynamics=1e-3)
    )
    assert sum(len(group["params"]) for group in groups) == len(list(mixer.parameters()))


def module(task: Task, **values: object) -> LayerAlignment:
    return LayerAlignment(task.mixer(), task.attention, task.parts["selection"], settings(**values))


def batch(task: Task) -> tuple[torch.Tensor, ...]:
    part = task.parts["calibration"]
    return part.x, part.context, part.starts


def test_the_teacher_is_nowhere_in_the_module(tasks) -> None:
    task = tasks("random_qwen3")
    inside = module(task)
    teachers = {id(p) for p in task.attention.parameters()}
    optimizer = inside.configure_optimizers()["optimizer"]
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in inside.mixer.parameters()}
    assert not teachers & (trained | {id(p) for p in inside.parameters()})
    assert all(name.startswith("mixers.0.") for name in inside.state_dict())
    assert len(inside.state_dict()) == len(inside.mixer.state_dict())

    # Wrong on purpose: a module that simply keeps its teacher has it in every checkpoint.
    inside.teacher = task.attention
    assert teachers & {id(p) for p in inside.parameters()}
    assert not all(name.startswith("mixers.0.") for name in inside.state_dict())


def test_no_gradient_reaches_the_teacher(tasks) -> None:
    task = tasks("random_qwen2")
    task.attention.requires_grad_(True)
    module(task).training_step(batch(task), 0).backward()
    assert all(p.grad is None for p in task.attention.parameters())
    task.attention.requires_grad_(False)


@pytest.mark.parametrize("name", TEACHERS)
def test_every_parameter_gets_a_gradient(tasks, name: str) -> None:
    task = tasks(name)
    trained = module(task)
    trained.training_step(batch(task), 0).backward()
    for parameter, value in trained.mixer.named_parameters():
        assert value.grad is not None and value.grad.isfinite().all(), parameter
        assert (value.grad != 0).any(), parameter


def test_a_silent_gate_can_learn_to_speak(tasks) -> None:
    task = tasks("random_llama")
    silent = module(task)
    nn.init.zeros_(silent.mixer.g_proj.weight)
    silent.training_step(batch(task), 0).backward()
    assert (silent.mixer.g_proj.weight.grad != 0).any()


def test_the_loss_is_the_relative_error(tasks) -> None:
    task = tasks("random_mistral")
    part, trained = task.parts["calibration"], module(task)
    said = torch.cat(
        [
            trained.mixer(row.x, position_ids=positions(row.starts))[0]
            for row in (part[i : i + 1] for i in range(len(part)))
        ]
    )
    teacher = task.attention.o_proj(part.context)
    want = (said - teacher).square().sum() / teacher.square().sum()
    loss = trained.training_step(batch(task), 0)
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=0)
    without = (said - teacher).square().mean()  # wrong on purpose: not relative
    assert abs(without / loss - 1) > 0.05


def positions(starts: torch.Tensor) -> torch.Tensor:
    at = torch.arange(starts.shape[1])
    return at - torch.where(starts, at, 0).cummax(1).values


@pytest.mark.parametrize("where", ["x", "context"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_the_layer(tasks, where: str, value: float) -> None:
    task = tasks("random_llama")
    x, context, starts = (t.clone() for t in batch(task))
    (x if where == "x" else context)[0, 0, 0] = value
    with pytest.raises(TCError, match=r"layer 1 is (nan|inf) at step 0.*align\.lr_projections"):
        module(task).training_step((x, context, starts), 0)


def learning_rates(task: Task, steps: int, **values: object) -> list[float]:
    """The learning rate of each step, as a part of the configured one."""
    made = module(task, steps=steps, lr_projections=0.5, lr_dynamics=0.5, **values)
    configured = made.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"] / 0.5)
        optimizer.step()
        schedule["scheduler"].step()
    assert schedule["interval"] == "step"
    return seen


def test_schedules(tasks) -> None:
    task = tasks("random_llama")
    constant, cosine = Schedule.constant, Schedule.cosine
    assert learning_rates(task, 6, schedule=constant) == [1.0] * 6
    got = learning_rates(task, 8, schedule=cosine)
    assert got == pytest.approx([(1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)])
    assert got[0] == 1 and got[4] == pytest.approx(0.5) and 0 < got[-1] < 0.05
    warm = learning_rates(task, 6, schedule=constant, warmup_steps=4)
    assert warm == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    both = learning_rates(task, 8, schedule=cosine, warmup_steps=4)
    assert both == pytest.approx([a * min(1, (i + 1) / 4) for i, a in enumerate(got)])
