"""An alignment leaves the best state that it measured, and nothing else behind."""

from __future__ import annotations

import copy
import gc
import logging
import math
from itertools import pairwise

import pytest
import torch
from align_helpers import INDEX, TEACHERS, Task, settings
from composing import group

from tc.align import Aligned, align_layer
from tc.align.module import LayerAlignment
from tc.config import AlignConfig, Schedule
from tc.errors import TCError
from tc.init import relative_error, solve_read_out
from tc.stats import LayerBatch
from tc.student.mixer import GatedDeltaNet


def aligned(
    task: Task,
    cfg: AlignConfig,
    seed: int = 0,
    mixer: GatedDeltaNet | None = None,
) -> tuple[GatedDeltaNet, Aligned]:
    mixer = mixer or task.mixer()
    return mixer, align_layer(mixer, task.attention, task.parts, cfg, seed)


def error_of(task: Task, mixer: GatedDeltaNet, part: str = "selection") -> float:
    return relative_error(mixer, task.attention, task.parts[part])


def same(a: GatedDeltaNet, b: GatedDeltaNet) -> bool:
    return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())


@pytest.mark.parametrize("lr", [1e-3, 3e-2])
def test_the_kept_state_is_the_one_that_was_measured(tasks, lr: float) -> None:
    task = tasks("random_llama")
    rates = {"lr_projections": lr, "lr_dynamics": lr, "schedule": Schedule.constant}
    mixer, result = aligned(task, settings(**rates))
    steps, errors = zip(*result.history, strict=True)
    assert steps == tuple(range(9))
    assert result.before == errors[0] == error_of(task, task.mixer())
    assert result.after == min(errors) == error_of(task, mixer)
    assert result.best_step == steps[errors.index(min(errors))]
    # The published fault, keeping the state one step later, cannot hide: no two errors are equal.
    assert all(a != b for a, b in pairwise(errors))


def test_a_diverging_alignment_gives_the_start_back(tasks) -> None:
    task = tasks("random_qwen3")
    start = task.mixer()
    solve_read_out(start, task.attention, *task.parts.values(), [1e-1])
    wild = settings(lr_projections=1.0, lr_dynamics=1.0, schedule=Schedule.constant)
    mixer, result = aligned(task, wild, mixer=copy.deepcopy(start))
    assert min(error for _, error in result.history[1:]) > result.before
    assert result.after == result.before and result.best_step == 0
    assert same(mixer, start)


def test_what_no_step_made_better_is_tried_again_more_slowly(tasks) -> None:
    task = tasks("random_qwen3")
    start = task.mixer()
    solve_read_out(start, task.attention, *task.parts.values(), [1e-1])

    def tried(lr: float, tries: int) -> tuple[GatedDeltaNet, Aligned]:
        cfg = settings(lr_projections=lr, lr_dynamics=lr, tries=tries)
        return aligned(task, cfg, mixer=copy.deepcopy(start))

    mixer, result = tried(1.0, 5)
    assert result.best_step > 0 and result.after < result.before and result.rate < 1
    # As one alignment at the rate of its last try: nothing of the earlier ones is left.
    directly, other = tried(result.rate, 1)
    assert same(mixer, directly) and other.history == result.history and other.rate == 1
    assert tried(result.rate * 4, 1)[1].best_step == 0, "the try before was not needed"
    # What one try makes better has no second.
    assert tried(result.rate, 5)[1].rate == 1
    # Where none does, it ends.
    mixer, result = tried(1.0, 1)
    assert same(mixer, start) and result.rate == 1


@pytest.mark.parametrize("name", TEACHERS)
def test_alignment_learns(tasks, name: str) -> None:
    task = tasks(name)
    frozen = copy.deepcopy(task.attention.state_dict())
    mixer, result = aligned(task, settings(steps=16, check_every=16, lr_dynamics=1e-2))
    assert [step for step, _ in result.history] == [0, 16]
    assert result.after < result.before
    assert error_of(task, mixer, "calibration") < 0.9 * error_of(task, task.mixer(), "calibration")
    changed = [
        n
        for n, p in mixer.named_parameters()
        if not torch.equal(p, dict(task.mixer().named_parameters())[n])
    ]
    assert sorted(changed) == sorted(n for n, _ in mixer.named_parameters())
    assert not any(p.requires_grad for p in mixer.parameters())
    assert {p.dtype for p in mixer.parameters()} == {torch.float32}
    assert all(torch.equal(frozen[n], p) for n, p in task.attention.state_dict().items())


def test_same_seed_same_bits(tasks) -> None:
    task = tasks("random_qwen2")
    results = []
    for seed, elsewhere in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(elsewhere)  # the global generator must not matter
        results.append(aligned(task, settings(steps=5), seed=seed))
    (a, first), (b, second), (c, other) = results
    assert same(a, b) and first == second
    assert not same(a, c) and first.history != other.history


@pytest.mark.parametrize("sequences", [3, 100])
def test_any_batch_size(tasks, sequences: int) -> None:
    _, result = aligned(tasks("random_mistral"), settings(batch_sequences=sequences))
    assert result.history[-1][0] == 8 and result.after < result.before


def test_a_loss_that_is_not_finite_is_an_error(tasks) -> None:
    task = copy.deepcopy(tasks("random_llama"))
    task.parts["calibration"].context[2, 5] = math.nan
    with pytest.raises(TCError, match=f"loss of layer {INDEX} is nan"):
        aligned(task, settings())


def test_documents_are_kept_apart_in_training(tasks) -> None:
    """Control: without document boundaries the same data gives other weights."""
    task = copy.deepcopy(tasks("random_llama"))
    right, _ = aligned(task, settings(steps=4, batch_sequences=8))
    part = task.parts["calibration"]
    task.parts["calibration"] = LayerBatch(part.x, part.context, torch.zeros_like(part.starts))
    wrong, _ = aligned(task, settings(steps=4, batch_sequences=8))
    assert not same(right, wrong)


def test_nothing_is_left_behind(tasks, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "tc")}
    aligned(tasks("random_llama"), settings(steps=2))
    assert list(tmp_path.iterdir()) == []
    assert torch.is_grad_enabled()
    assert {name: logging.getLogger(name).level for name in levels} == levels
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is LayerAlignment]


@pytest.mark.parametrize("name", ["quick", "paper"])
def test_shipped_settings(tasks, name: str) -> None:
    cfg = group("align", name)
    assert cfg.name == name
    if name == "paper":
        assert (cfg.steps, cfg.lr_projections, cfg.lr_dynamics) == (300, 1e-4, 1e-3)
    cfg.steps, cfg.check_every = 4, 2
    _, result = aligned(tasks("random_qwen2"), cfg)
    assert result.after < result.before
