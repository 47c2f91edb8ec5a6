"""The student that is trained: what is its own, what is its teacher's, and in which dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recovery_helpers import LAYERS, Task, recipe, same, teacher
from torch import nn

from tc.config import KL, Precision
from tc.recovery import load_weights
from tc.recovery.checkpoint import trained
from tc.recovery.model import Distillation

MIXERS = tuple(f"model.layers.{i}.self_attn." for i in LAYERS)
BFLOAT16 = "teacher.dtype=bfloat16"


def places(model: nn.Module) -> dict[str, int]:
    """Where in memory every weight lies."""
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def task_of(folder: Path, *overrides: str, precision: Precision, **recipes: float) -> Task:
    model = teacher(folder, "random_llama", *overrides)
    return Task(folder / "run", model, recipe(**recipes), precision=precision)


@pytest.mark.parametrize("dtype", [[], [BFLOAT16]])
def test_what_is_frozen_is_the_teachers_memory(dtype: list[str], tmp_path: Path) -> None:
    task = task_of(tmp_path, *dtype, precision=Precision.bfloat16)
    student, own = task.student(), places(task.teacher)
    for name, parameter in student.named_parameters():
        is_mixers = name.startswith(MIXERS)
        assert parameter.requires_grad == is_mixers, name
        assert parameter.dtype == (torch.float32 if is_mixers else task.teacher.dtype), name
        assert (parameter.data_ptr() in own.values()) != is_mixers, name
        if not is_mixers:
            assert parameter.data_ptr() == own[name], name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [[], [BFLOAT16]])
def test_what_is_trained_has_float32_masters_of_its_own(
    dtype: list[str], tied: bool, tmp_path: Path
) -> None:
    tie = f"++teacher.model.tie_word_embeddings={tied}"
    task = task_of(tmp_path, *dtype, tie, precision=Precision.bfloat16, lr_rest=1e-3)
    student, before = task.student(), dict(task.teacher.named_parameters())
    assert not set(places(student).values()) & set(places(task.teacher).values())
    for name, parameter in student.named_parameters():
        assert parameter.requires_grad and parameter.dtype == torch.float32, name
        if not name.startswith(MIXERS):
            assert torch.equal(parameter, before[name].float()), name
    assert (student.lm_head.weight is student.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in trained(student)) == (not tied)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("terms", [{"kl": 0.0, "hidden": 1.0}, {"kl": 0.5, "hidden": 1.0}])
def test_a_head_that_no_loss_sees_is_not_trained(
    tied: bool, terms: dict[str, float], tmp_path: Path
) -> None:
    """And all that is trained gets a gradient, which DDP waits for."""
    tie = f"++teacher.model.tie_word_embeddings={tied}"
    task = task_of(tmp_path, tie, precision=Precision.float32, lr_rest=1e-3, **terms)
    student = task.student()
    seen = terms["kl"] > 0 or tied
    assert student.lm_head.weight.requires_grad == seen
    both = Distillation(task.teacher, student, task.cfg.stage2, KL.chunk, recompute=False)
    ids = torch.arange(8)[None]
    both(ids, ids)["loss"].backward()
    assert all(parameter.grad is not None for parameter in trained(student).values())


def test_a_half_precision_teacher_is_widened_to_compute_in_float32(tmp_path: Path) -> None:
    task = task_of(tmp_path, BFLOAT16, precision=Precision.float32)
    student = task.student()
    assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}
    assert all(name.startswith(MIXERS) for name in trained(student))
    assert task.teacher.dtype == torch.bfloat16


@pytest.mark.parametrize("lr_rest", [0.0, 1e-3])
def test_loading_weights_never_reaches_the_teacher(lr_rest: float, tmp_path: Path) -> None:
    task = task_of(tmp_path, BFLOAT16, precision=Precision.bfloat16, lr_rest=lr_rest)
    before = {name: value.clone() for name, value in task.teacher.state_dict().items()}
    weights = {name: value.detach() + 1 for name, value in trained(task.student()).items()}
    kept = {name: value.clone() for name, value in weights.items()}
    frozen = Task(tmp_path / "other", task.teacher, recipe(), precision=Precision.bfloat16)
    student = frozen.student()  # all but its mixers is its teacher's memory
    load_weights(student, weights)
    assert same(dict(task.teacher.state_dict()), before)
    assert student.lm_head.weight is student.model.embed_tokens.weight
    own = dict(student.named_parameters())
    assert all(torch.equal(own[name], value.to(own[name].dtype)) for name, value in kept.items())
    with torch.no_grad():
        for parameter in own.values():
            parameter.zero_()  # what the weights came from is not the student's memory either
    assert lr_rest == 0 or own["model.embed_tokens.weight"].dtype == torch.bfloat16
