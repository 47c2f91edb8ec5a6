"""Who is trained at which rate, rates in tokens, and what a step that is not finite does."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import RANDOM_TEACHERS
from recovery_helpers import LAYERS, STEPS, T, Task, recipe, same, stopping_after, teacher
from transformers import PreTrainedModel

from tc.config import KL, NonFinite, OptimizerKind, RecoveryConfig, Schedule
from tc.errors import TCError
from tc.recovery import Stopped, Watch
from tc.recovery.checkpoint import trained
from tc.recovery.model import Distillation
from tc.recovery.module import MOST_SKIPS, Recovery

THREE = "teacher.model.num_hidden_layers=3"
MIXERS = tuple(f"model.layers.{i}.self_attn." for i in LAYERS)


def module(task: Task) -> Recovery:
    terms = task.cfg.stage2 if task.name == "stage2" else None
    both = Distillation(task.teacher, task.student(), terms, KL.chunk, False)
    return Recovery(
        both, task.name, task.cfg.stages[task.name], task.cfg, 0, (task.stage().training, 0)
    )


@pytest.mark.parametrize("kind", OptimizerKind)
@pytest.mark.parametrize("name", RANDOM_TEACHERS)
def test_every_parameter_has_its_rate_its_decay_and_its_optimizer(
    name: str, kind: OptimizerKind, tmp_path: Path
) -> None:
    own = {"lr_mixers": 1e-3, "lr_rest": 1e-5, "weight_decay": 0.1, "optimizer": kind}
    found = module(Task(tmp_path / "run", teacher(tmp_path, name, THREE), recipe(**own)))
    groups = {
        id(parameter): group
        for group in found.configure_optimizers()["optimizer"].param_groups
        for parameter in group["params"]
    }
    parameters = trained(found.distillation.student)
    assert len(groups) == len(parameters)
    for name, parameter in parameters.items():
        group = groups[id(parameter)]
        assert group["initial_lr"] == (1e-3 if name.startswith(MIXERS) else 1e-5), name
        assert group["weight_decay"] == (0.1 if parameter.dim() >= 2 else 0.0), name
        assert group["muon"] <= (parameter.dim() == 2), name
        if name.endswith(("A_log", "dt_bias", "bias", "norm.weight")):
            assert group["weight_decay"] == 0.0 and not group["muon"], name
    for name in (
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
    ):
        assert groups[id(parameters[name])]["muon"] == (kind is OptimizerKind.muon)
    assert not groups[id(parameters["model.embed_tokens.weight"])]["muon"]


@pytest.mark.parametrize("kind", OptimizerKind)
@pytest.mark.parametrize("name", RANDOM_TEACHERS)
def test_every_architecture_learns(name: str, kind: OptimizerKind, tmp_path: Path) -> None:
    model = teacher(tmp_path, name, THREE)
    for stage, rest in (("stage1", {}), ("stage2", {"lr_rest": 1e-3})):
        task = Task(tmp_path / stage, model, recipe(stage, optimizer=kind, **rest), stage)
        before = dict(task.student().named_parameters())
        weights = task.run()
        assert all(value.isfinite().all() for value in weights.values())
        assert [n for n in weights if torch.equal(weights[n], before[n])] == []


def rates(task: Task) -> dict[int, float]:
    """Learning rates by the tokens that were seen when their step was over."""
    task.run()
    points = task.info["history"]
    return {point["tokens"]: point["learning_rate"] for point in points if "loss" in point}


@pytest.mark.parametrize("schedule", Schedule)
def test_rates_go_by_tokens_and_not_by_steps(schedule: Schedule, tmp_path: Path) -> None:
    model, tokens = teacher(tmp_path), 8 * 4 * T
    own: dict[str, Any] = {"tokens": tokens, "schedule": schedule, "decay_share": 0.25}

    def by_tokens(size: int, warmup: int) -> dict[int, float]:
        cfg = recipe(batch_sequences=size, warmup_tokens=warmup, **own)
        return rates(Task(tmp_path / f"{size}-{warmup}", model, cfg))

    # Without warm-up the rate is that of the tokens before a step; half a step's size more steps.
    for_two = {end - 2 * T: rate for end, rate in by_tokens(2, 0).items()}
    for_four = {end - 4 * T: rate for end, rate in by_tokens(4, 0).items()}
    assert for_four == pytest.approx({start: for_two[start] for start in for_four})
    assert for_four[0] == 1e-3
    middle = {Schedule.constant: 1.0, Schedule.cosine: 0.5, Schedule.wsd: 1.0}[schedule]
    assert for_four[tokens // 2] == pytest.approx(1e-3 * middle)
    at_end = {
        Schedule.constant: 1.0,
        Schedule.cosine: 0.5 * (1 + math.cos(math.pi * 7 / 8)),
        Schedule.wsd: 0.5,
    }[schedule]
    assert for_four[7 * 4 * T] == pytest.approx(1e-3 * at_end)
    if schedule is Schedule.constant:
        two, four = (by_tokens(size, 16 * T) for size in (2, 4))
        assert four == pytest.approx({end: two[end] for end in four})
        expected = [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3]
        assert list(four.values()) == pytest.approx(expected)


class Poisoned(Task):
    """At some steps one mixer of the student says NaN.

    Attributes:
        steps: those steps, counted from 1 in each run.
        states: the student's weights after each step.
    """

    steps: tuple[int, ...] = ()

    def student(self) -> PreTrainedModel:
        student, self.states, passes = super().student(), [], []

        def poison(_: Any, __: Any, output: Any) -> Any:
            if not torch.is_grad_enabled():
                return output
            passes.append(1)
            return (output[0] * math.nan, None) if len(passes) in self.steps else output

        student.mixers[LAYERS[1]].register_forward_hook(poison)
        return student

    def watch(self, said: list[str]) -> Watch:
        def tokens(_: int) -> None:
            self.states.append({k: v.clone() for k, v in self.trained.state_dict().items()})

        return Watch(tokens=tokens, say=said.append)


def poisoned(folder: Path, name: str, steps: tuple[int, ...], cfg: RecoveryConfig) -> Poisoned:
    task = Poisoned(folder / f"{name}{len(steps)}", teacher(folder), cfg, name)
    task.steps = steps
    return task


@pytest.mark.parametrize(
    ("name", "term"),
    [
        ("stage1", f"layer_{LAYERS[1]}"),
        ("stage2", f"kl, first in the output of layer {LAYERS[1]}"),
    ],
)
def test_a_step_without_a_number_leaves_everything_as_it_was(
    name: str, term: str, tmp_path: Path
) -> None:
    said: list[str] = []
    task = poisoned(tmp_path, name, (3,), recipe(name, weight_decay=0.1))
    task.run(task.watch(said))
    pairs = [same(a, b) for a, b in zip(task.states, task.states[1:], strict=False)]
    assert pairs == [step == 3 for step in range(1, STEPS + 1)]
    points = [point for point in task.info["history"] if "loss" in point]
    assert [point["skipped_steps"] for point in points] == [0, 0, 1, 1, 1, 1]
    assert math.isnan(points[2]["loss"])
    skips = [line for line in said if "skipped" in line]
    assert len(skips) == 1 and f"step 3: loss, {term}." in skips[0]
    assert f"layer_{LAYERS[0]}" not in skips[0]


class BadGradient(Poisoned):
    """At some steps the gradient behind one mixer is NaN, and no loss is."""

    def student(self) -> PreTrainedModel:
        student = Task.student(self)
        self.states, passes = [], []

        def poison(_: Any, __: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                passes.append(1)
                if len(passes) in self.steps:
                    output[0].register_hook(lambda gradient: gradient * math.nan)

        student.mixers[LAYERS[0]].register_forward_hook(poison)
        return student


def test_a_gradient_alone_is_traced_to_where_it_came_from(tmp_path: Path) -> None:
    said: list[str] = []
    task = BadGradient(tmp_path / "task", teacher(tmp_path), recipe())
    task.steps = (3,)
    task.run(task.watch(said))
    (skip,) = [line for line in said if "skipped" in line]
    prefix = f"model.layers.{LAYERS[0]}.self_attn."
    assert "the gradient alone, of " in skip and f"first that of {prefix}o_proj.weight" in skip
    assert "loss" not in skip


def test_the_count_of_skips_goes_on_after_a_stop(tmp_path: Path) -> None:
    task = poisoned(tmp_path, "stage2", (2,), recipe())
    with pytest.raises(Stopped):
        task.run(stopping_after(3, signal.SIGTERM))
    task.steps = ()
    task.run()
    assert task.info["skipped"] == 1
    assert task.info["history"][-2]["skipped_steps"] == 1


def test_stop_means_the_first_such_step(tmp_path: Path) -> None:
    task = poisoned(tmp_path, "stage1", (2,), recipe("stage1", non_finite=NonFinite.stop))
    with pytest.raises(TCError, match=f"stage1: not finite at step 2: loss, layer_{LAYERS[1]}"):
        task.run()
    kept = [path.name for path in (task.folder / "stage1").iterdir()]
    assert kept == ["step_0000001"]


def test_ten_in_a_row_stop_and_nine_do_not(tmp_path: Path) -> None:
    cfg = recipe(tokens=4 * T * (MOST_SKIPS + 4), batch_sequences=4)
    nine = tuple(range(2, MOST_SKIPS + 1))
    # With a good step between, more than ten in all do no harm.
    task = poisoned(tmp_path, "stage2", (*nine, MOST_SKIPS + 2, MOST_SKIPS + 3), cfg)
    task.run()
    assert task.info["skipped"] == MOST_SKIPS + 1
    task = poisoned(tmp_path, "stage2", (*nine, MOST_SKIPS + 1), cfg)
    with pytest.raises(TCError, match="10 steps in a row"):
        task.run()
