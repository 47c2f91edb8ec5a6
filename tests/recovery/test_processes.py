"""Real processes: DDP, FSDP, torchrun, kills; all of them the command that a person types."""

from __future__ import annotations

import csv
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import ROOT
from recovery_helpers import gap, same

from tc.artifacts import load_tensors, read_manifest
from tc.consolidate import main
from tc.recovery import read_weights

STEPS = 12
OVERRIDES = [
    *("experiment=smoke", "trainer.accelerator=cpu", "init=copy_only", "recovery.validations=0"),
    *("recovery.stage1.tokens=256", "recovery.stage1.sequence_length=32"),
    *("recovery.stage2.tokens=768", "recovery.stage2.sequence_length=32"),
    *("recovery.stage2.lr_rest=1e-3", "recovery.checkpoint_tokens=64"),
    "stages=[data,initialise,recover,student]",
]
TWO = ["trainer.devices=2", "trainer.precision=float32"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of one process, and the cache that all runs share."""
    folder = tmp_path_factory.mktemp("processes")
    assert finish(folder, "one", "trainer=cpu") == 0
    return folder


def start(
    folder: Path,
    name: str,
    *overrides: str,
    launcher: tuple[str, ...] = (),
    before: Callable[[], None] | None = None,
) -> subprocess.Popen:
    """Starts a run in a process group of its own."""
    places = [f"run_dir={folder / name}", f"paths.cache_dir={folder / 'cache'}"]
    # Of a stage that is left out nothing else may be said.
    one_stage = "recovery.stage1.tokens=0" in overrides
    common = [x for x in OVERRIDES if not (one_stage and x.startswith("recovery.stage1."))]
    command = [sys.executable, *launcher, "run.py", *common, *places, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / f"{name}.log", "a") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=before,
        )


def finish(folder: Path, name: str, *overrides: str, **how: Any) -> int:
    return start(folder, name, *overrides, **how).wait(200)


def stop(folder: Path, name: str, step: int, number: int, *overrides: str) -> Path:
    """Sends a run a signal once it has reached a step of stage 2; its newest checkpoint."""
    process = start(folder, name, *overrides)
    steps = folder / name / "recover" / "stage2"
    wait_for(lambda: any(path.name >= f"step_{step:07d}" for path in steps.glob("step_*")), process)
    process.send_signal(number)
    assert process.wait(100) == 130, (folder / f"{name}.log").read_text()
    wait_for(lambda: not is_alive(process.pid))
    return sorted(steps.glob("step_*"))[-1]


def is_alive(process_group: int) -> bool:
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True


def result(folder: Path, name: str, stage: str = "stage2") -> dict[str, torch.Tensor]:
    done = folder / name / "recover" / stage / "done"
    manifest = read_manifest(done)
    assert manifest is not None, (folder / f"{name}.log").read_text()
    return read_weights(done, manifest)


def losses(folder: Path, name: str, stage: str) -> list[float]:
    manifest = read_manifest(folder / name / "recover" / stage / "done")
    assert manifest is not None
    return [point["loss"] for point in manifest.info["history"] if "loss" in point]


def wait_for(come: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
    """Returns when something has come about, which it must before a process has ended."""
    for _ in range(20000):
        if come():
            return
        assert process is None or process.poll() is None
        time.sleep(0.005)
    raise AssertionError("it never came")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_come_to_what_one_does(strategy: str, base: Path) -> None:
    assert finish(base, strategy, f"trainer={strategy}", *TWO) == 0
    for stage in ("stage1", "stage2"):
        own, expected = losses(base, strategy, stage), losses(base, "one", stage)
        assert len(own) == (4 if stage == "stage1" else STEPS)
        assert own == pytest.approx(expected, rel=1e-5)
        assert gap(result(base, strategy, stage), result(base, "one", stage)) < 1e-4
    files = sorted(p.name for p in (base / strategy / "recover/stage2/done").glob("rank_*"))
    assert len(files) == (2 if strategy == "fsdp" else 1)
    done, made = base / strategy / "recover/stage2/done", base / f"{strategy}_made"
    assert main([str(base / strategy), str(done), str(made)]) == 0
    students = [
        load_tensors(at / "model.safetensors") for at in (base / strategy / "student", made)
    ]
    assert same(*students)


def test_a_sharded_checkpoint_becomes_a_student_and_goes_on_in_one_process(base: Path) -> None:
    newest = stop(base, "cut", 1, signal.SIGTERM, "trainer=fsdp", *TWO)
    assert len(list(newest.glob("rank_*"))) == 2
    assert main([str(base / "cut"), str(newest), str(base / "made")]) == 0
    manifest = read_manifest(newest)
    assert manifest is not None
    student = load_tensors(base / "made" / "model.safetensors")
    weights = read_weights(newest, manifest)
    assert weights.keys() >= student.keys()  # stage 2 trains all; the tied head is saved once
    assert all(torch.equal(value, weights[name]) for name, value in student.items())
    assert main([str(base / "cut"), str(base / "one"), str(base / "made2")]) == 1
    assert finish(base, "cut", "trainer=cpu") == 0
    assert gap(result(base, "cut"), result(base, "one")) < 1e-4
    assert losses(base, "cut", "stage2") == pytest.approx(losses(base, "one", "stage2"), rel=1e-5)


def test_the_mixers_alone_are_trained_in_shards_too(base: Path) -> None:
    """What is frozen is shared with the teacher, until both are dealt apart."""
    options = ("recovery.stage1.tokens=0", "recovery.stage2.lr_rest=0")
    assert finish(base, "frozen1", "trainer=cpu", *options) == 0
    assert finish(base, "frozen2", "trainer=fsdp", *TWO, *options) == 0
    expected = result(base, "frozen1")
    assert all(".self_attn." in name for name in expected)
    assert gap(result(base, "frozen2"), expected) < 1e-4
    assert losses(base, "frozen2", "stage2") == pytest.approx(
        losses(base, "frozen1", "stage2"), rel=1e-5
    )


def test_two_processes_train_what_the_streams_alone_reach(base: Path) -> None:
    """Of an untied head no loss on the streams has a gradient, which DDP would wait for."""
    options = ("recovery.stage1.tokens=0", "recovery.stage2.kl=0", "recovery.stage2.hidden=1")
    options += ("teacher.model.tie_word_embeddings=false", "recovery.stage2.tokens=128")
    assert finish(base, "streams", "trainer=ddp", *TWO, *options) == 0
    trained = result(base, "streams")
    assert "model.embed_tokens.weight" in trained and "lm_head.weight" not in trained


def test_a_checkpoint_of_one_process_goes_on_in_two_and_those_in_others(base: Path) -> None:
    """One process, then DDP, then FSDP: each ends by a signal, all of its processes with it."""
    first = stop(base, "grown", 1, signal.SIGUSR1, "trainer=cpu")
    step = int(first.name.removeprefix("step_")) + 1
    second = stop(base, "grown", step, signal.SIGTERM, "trainer=ddp", *TWO)
    assert len(list(second.glob("rank_*"))) == 1
    assert finish(base, "grown", "trainer=fsdp", *TWO) == 0
    assert gap(result(base, "grown"), result(base, "one")) < 1e-4


def test_torchrun_starts_the_processes_too(base: Path) -> None:
    """And the second one waits for what the first makes, recomputes, and writes nothing.

    What the first one is about to clear away, it takes for nothing that it need not do.
    """
    shutil.copytree(base / "one", base / "torchrun")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    options = ("trainer=fsdp", *TWO, "recovery.activation_checkpointing=true", "resume=false")
    assert finish(base, "torchrun", *options, launcher=launcher) == 0
    assert gap(result(base, "torchrun"), result(base, "one")) < 1e-4
    own, expected = losses(base, "torchrun", "stage2"), losses(base, "one", "stage2")
    assert own == pytest.approx(expected, rel=1e-5)
    assert [step for step, _ in curve(base, "torchrun")] == list(range(1, STEPS + 1))
    said = (base / "torchrun.log").read_text()
    assert said.count("validation perplexity") == 4  # start and end of two stages, once each


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and losses of stage 2 as the logger has written them."""
    file = folder / name / "curves" / "metrics.csv"
    if not file.is_file():
        return []
    with open(file) as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("recover/stage2/loss")]
    return [(int(row["step"]), float(row["recover/stage2/loss"])) for row in rows]


def test_kills_lose_no_more_than_an_interval_and_change_nothing(base: Path) -> None:
    draw, folder = random.Random(0), base / "killed"
    for _ in range(4):
        process = start(base, "killed", "trainer=cpu")
        # On a fast machine the last of these is done before a kill.
        wait_for(lambda: any(folder.glob("recover/*/step_*")) or process.poll() == 0)  # noqa: B023
        end = time.time() + draw.uniform(0, 0.4)
        wait_for(lambda: time.time() > end or process.poll() is not None)  # noqa: B023
        kill(process)
        reached = max((step for step, _ in curve(base, "killed")), default=0)
        assert steps_kept(folder) >= (1000 + reached - 1 if reached else 1)
    assert finish(base, "killed", "trainer=cpu") == 0
    assert same(result(base, "killed"), result(base, "one"))
    assert losses(base, "killed", "stage2") == losses(base, "one", "stage2")
    assert not list(folder.joinpath("recover").rglob(".*"))
    assert not list(folder.joinpath("recover").rglob("step_*"))


def kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_full_disk_is_one_message_and_the_same_command_goes_on(base: Path) -> None:
    """Files of at most 1 MB: stage 1 fits, a checkpoint of stage 2 (1.4 MB) does not."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    assert finish(base, "full", "trainer=cpu", before=limit) == 1
    said = (base / "full.log").read_text()
    assert said.count("error: cannot write") == 1 and "recover/stage2" in said
    assert "larger than allowed" in said and "Traceback" not in said
    assert [path.name for path in (base / "full/recover/stage1").iterdir()] == ["done"]
    assert list((base / "full/recover/stage2").iterdir()) == []
    assert finish(base, "full", "trainer=cpu") == 0
    assert same(result(base, "full"), result(base, "one"))


def steps_kept(folder: Path) -> int:
    """The step that the next run would go on from, stage 2 counted behind stage 1."""
    if (folder / "recover/stage2/done").is_dir():
        return 1000 + STEPS
    for offset, stage in ((1000, "stage2"), (0, "stage1")):
        steps = sorted((folder / "recover" / stage).glob("step_*/manifest.json"))
        if steps:
            return offset + int(steps[-1].parent.name.removeprefix("step_"))
    return 0
