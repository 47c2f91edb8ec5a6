"""One process: what is trained and what is not, checkpoints, signals, accumulation, the guard."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from recovery_helpers import LAYERS, STEPS, Task, gap, recipe, same, stopping_after, teacher

import tc.recovery.run as stage_run
from tc.config import OptimizerKind, Precision
from tc.errors import TCError
from tc.recovery import Stopped, Watch
from tc.recovery.module import Recovery
from tc.recovery.run import milestones
from tc.signals import STOPPING

pytestmark = pytest.mark.usefixtures("signals_heard")


def curve(task: Task) -> list[dict[str, float]]:
    timed = ("tokens_per_second",)
    return [{k: v for k, v in point.items() if k not in timed} for point in task.info["history"]]


@pytest.mark.parametrize("name", ["stage1", "stage2"])
@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_saves_and_the_same_call_ends_as_if_undisturbed(
    name: str, number: int, tmp_path: Path
) -> None:
    model = teacher(tmp_path)
    whole = Task(tmp_path / "whole", model, recipe(name), name)
    cut = Task(tmp_path / "cut", model, recipe(name), name)
    expected = whole.run()
    before = signal.getsignal(number)
    with pytest.raises(Stopped):
        cut.run(stopping_after(3, number))
    assert signal.getsignal(number) == before
    assert not cut.done.exists()
    newest = sorted((tmp_path / "cut" / name).glob("step_*"))[-1]
    assert newest.name == "step_0000003"
    said: list[str] = []
    assert same(cut.run(Watch(say=said.append)), expected)
    assert f"continues at step 3 of {STEPS}" in said[0]
    assert curve(cut) == curve(whole)


def test_a_signal_in_the_last_step_ends_the_run_behind_a_whole_stage(tmp_path: Path) -> None:
    task = Task(tmp_path / "last", teacher(tmp_path), recipe())
    with pytest.raises(Stopped):
        task.run(stopping_after(STEPS, signal.SIGTERM))
    assert task.done.exists()


@pytest.mark.parametrize("kind", OptimizerKind)
def test_with_all_trained_and_any_optimizer_too(kind: OptimizerKind, tmp_path: Path) -> None:
    model = teacher(tmp_path)
    options = {"optimizer": kind, "lr_rest": 1e-3, "weight_decay": 0.1, "micro_sequences": 2}
    whole, cut = (Task(tmp_path / name, model, recipe(**options)) for name in ("whole", "cut"))
    expected = whole.run()
    for step in (1, 2):  # stopped anew after each of the steps that are left
        with pytest.raises(Stopped):
            cut.run(stopping_after(step, signal.SIGTERM))
    assert same(cut.run(), expected)
    assert curve(cut) == curve(whole)


@pytest.mark.parametrize("name", ["stage1", "stage2"])
def test_accumulation_changes_neither_loss_nor_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four sequences at once, in two micro-batches and in four: the mean, not the sum."""
    model = teacher(tmp_path)

    def ran(folder: str, micro: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        task = Task(tmp_path / folder, model, recipe(name, micro_sequences=micro), name)
        weights = task.run()
        points = [p for p in task.info["history"] if "loss" in p]
        assert len(points) == STEPS
        return [p[key] for p in points for key in ("loss", "gradient_norm")], weights

    values, weights = ran("whole", None)
    for micro in (1, 2):
        own, found = ran(f"micro{micro}", micro)
        assert own == pytest.approx(values, rel=1e-4)
        assert gap(found, weights) < 1e-4
    real = Recovery.training_step  # a control: a loss that is summed
    monkeypatch.setattr(Recovery, "training_step", lambda *a: 2 * real(*a))
    assert ran("summed", 2)[0] != pytest.approx(values, rel=1e-4)


def test_ctrl_c_after_other_signals_stops_at_once(tmp_path: Path) -> None:
    model = teacher(tmp_path)
    expected = Task(tmp_path / "whole", model, recipe()).run()
    task, before = Task(tmp_path / "cut", model, recipe()), signal.getsignal(signal.SIGINT)
    seen: list[int] = []

    def tokens(count: int) -> None:
        seen.append(count)
        if len(seen) == 4:  # in step 3
            for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
                os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt) as error:
        task.run(Watch(tokens=tokens))
    assert not isinstance(error.value, Stopped)
    assert error.value.number == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) == before
    kept = sorted(path.name for path in (task.folder / "stage2").iterdir())
    assert kept == ["step_0000001", "step_0000002"]
    assert same(task.run(), expected)


def interrupted(folder: Path) -> tuple[Task, dict[str, torch.Tensor]]:
    """A run stopped after four of six steps, and what it should come to."""
    model = teacher(folder)
    expected = Task(folder / "whole", model, recipe()).run()
    task = Task(folder / "cut", model, recipe())
    with pytest.raises(Stopped):
        task.run(stopping_after(4, signal.SIGTERM))
    return task, expected


def test_a_truncated_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    task, expected = interrupted(tmp_path)
    newest = sorted((task.folder / "stage2").glob("step_*"))[-1]
    file = newest / "rank_000.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    said: list[str] = []
    assert same(task.run(Watch(say=said.append)), expected)
    assert str(newest) in said[0] and "the checkpoint before it" in said[0]
    assert "continues at step 3" in said[1]


def test_a_foreign_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    task, expected = interrupted(tmp_path)
    newest = sorted((task.folder / "stage2").glob("step_*"))[-1]
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["made_by"]["made"] = "elsewhere"
    (newest / "manifest.json").write_text(json.dumps(manifest))
    said: list[str] = []
    assert same(task.run(Watch(say=said.append)), expected)
    assert str(newest) in said[0] and "elsewhere" in said[0]


def test_checkpoints_hold_what_is_trained_and_nothing_of_the_teacher(tmp_path: Path) -> None:
    task, _ = interrupted(tmp_path)
    folder = task.folder / "stage2"
    assert [p.name for p in sorted(folder.glob("step_*"))] == ["step_0000003", "step_0000004"]
    files = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert files == {".safetensors", ".json"}
    from tc.artifacts import load_tensors

    names = load_tensors(folder / "step_0000004" / "rank_000.safetensors")
    kinds = {name.partition("/")[0] for name in names}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq", "step"}
    mixers = tuple(f"model.layers.{i}.self_attn." for i in LAYERS)
    assert all(name.partition("/")[2].startswith(mixers) for name in names)
    task.run()
    assert [p.name for p in folder.iterdir()] == ["done"]


def test_a_full_disk_ends_with_the_last_checkpoint_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = teacher(tmp_path)
    expected = Task(tmp_path / "whole", model, recipe()).run()
    task, real, calls = Task(tmp_path / "cut", model, recipe()), stage_run.write, []

    def write(folder: Path, *args: object) -> None:
        calls.append(folder)
        if len(calls) == 3:
            import tc.recovery.checkpoint as checkpoint

            with monkeypatch.context() as patch:
                patch.setattr(checkpoint, "save_tensors", full)
                real(folder, *args)
        real(folder, *args)

    def full(path: Path, tensors: object) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage_run, "write", write)
    with pytest.raises(TCError, match="no space left on the device"):
        task.run()
    left = sorted(p.name for p in (task.folder / "stage2").iterdir())
    assert left == ["step_0000001", "step_0000002"]
    assert same(task.run(), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_the_teacher_stays_as_it_was_and_what_is_frozen_with_it(tied: bool, tmp_path: Path) -> None:
    model = teacher(tmp_path, "random_llama", f"++teacher.model.tie_word_embeddings={tied}")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    mixers = tuple(f"model.layers.{i}.self_attn." for i in LAYERS)
    for lr_rest in (0.0, 1e-3):
        task = Task(tmp_path / f"run{lr_rest}", model, recipe(lr_rest=lr_rest))
        weights = task.run()
        assert same(dict(model.state_dict()), before)
        rest = {k: v for k, v in task.trained.state_dict().items() if not k.startswith(mixers)}
        changed = {name for name, value in rest.items() if not torch.equal(value, before[name])}
        if lr_rest == 0:
            assert not changed
            assert all(name.startswith(mixers) for name in weights)
        else:
            assert "model.embed_tokens.weight" in changed
            assert "model.layers.1.self_attn.q_proj.weight" in changed
            is_tied = task.trained.lm_head.weight is task.trained.model.embed_tokens.weight
            assert is_tied == tied


def test_recomputing_changes_nothing(tmp_path: Path) -> None:
    model = teacher(tmp_path)
    for name in ("stage1", "stage2"):
        plain = Task(tmp_path / f"{name}0", model, recipe(name), name).run()
        again = recipe(name, activation_checkpointing=True)
        assert gap(plain, Task(tmp_path / f"{name}1", model, again, name).run()) < 1e-6


def test_a_bfloat16_teacher_has_float32_masters(tmp_path: Path) -> None:
    model = teacher(tmp_path, "random_llama", "teacher.dtype=bfloat16")
    first = {}
    for precision in Precision:
        for name in ("stage1", "stage2"):
            task = Task(tmp_path / f"{precision.name}{name}", model, recipe(name), name, precision)
            weights = task.run()
            assert {value.dtype for value in weights.values()} == {torch.float32}
            assert all(value.isfinite().all() for value in weights.values())
            first[name, precision] = task.info["history"][1]["loss"]
    for name in ("stage1", "stage2"):
        wide, narrow = (
            first[name, precision] for precision in (Precision.float32, Precision.bfloat16)
        )
        assert wide != narrow == pytest.approx(wide, rel=0.02)
    assert model.dtype == torch.bfloat16


def test_milestones_are_log_spaced_and_end_at_the_end() -> None:
    assert milestones(1000, 3) == {1, 10, 100, 1000}
    assert milestones(5, 40) == {1, 2, 3, 4, 5}
    assert milestones(7, 0) == set()
