"""Real processes: DDP, FSDP, torchrun, kills; all of them the command that a person types."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from composing import ROOT
from recovery_helpers import gap, same

from tc.artifacts import load_tensors, read_manifest
from tc.consolidate import main
from tc.recovery import read_weights

STEPS = 8
OVERRIDES = [
    *("experiment=smoke", "trainer.accelerator=cpu", "init=copy_only", "recovery.validations=0"),
    *("recovery.stage1.tokens=256", "recovery.stage1.sequence_length=32"),
    *("recovery.stage2.tokens=512", "recovery.stage2.sequence_length=32"),
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
    folder: Path, name: str, *overrides: str, launcher: tuple[str, ...] = ()
) -> subprocess.Popen:
    """Starts a run in a process group of its own."""
    places = [f"run_dir={folder / name}", f"paths.cache_dir={folder / 'cache'}"]
    command = [sys.executable, *launcher, "run.py", *OVERRIDES, *places, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / f"{name}.log", "a") as log:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def finish(folder: Path, name: str, *overrides: str, launcher: tuple[str, ...] = ()) -> int:
    return start(folder, name, *overrides, launcher=launcher).wait(120)


def result(folder: Path, name: str, stage: str = "stage2") -> dict[str, torch.Tensor]:
    done = folder / name / "recover" / stage / "done"
    manifest = read_manifest(done)
    assert manifest is not None, (folder / f"{name}.log").read_text()
    return read_weights(done, manifest)


def losses(folder: Path, name: str, stage: str) -> list[float]:
    manifest = read_manifest(folder / name / "recover" / stage / "done")
    assert manifest is not None
    return [point["loss"] for point in manifest.info["history"] if "loss" in point]


def wait_for(folder: Path, name: str, pattern: str, process: subprocess.Popen) -> None:
    """Returns when a file or folder has come into being in a run."""
    for _ in range(6000):
        if list((folder / name).glob(pattern)):
            return
        assert process.poll() is None, (folder / f"{name}.log").read_text()
        time.sleep(0.01)
    raise AssertionError(f"{pattern} never came")


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


def test_a_sharded_checkpoint_becomes_a_student_and_goes_on_in_one_process(base: Path) -> None:
    process = start(base, "cut", "trainer=fsdp", *TWO)
    wait_for(base, "cut", "recover/stage2/step_0000003/manifest.json", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    newest = sorted((base / "cut/recover/stage2").glob("step_*"))[-1]
    assert len(list(newest.glob("rank_*"))) == 2
    assert main([str(base / "cut"), str(newest), str(base / "made")]) == 0
    manifest = read_manifest(newest)
    assert manifest is not None
    student = load_tensors(base / "made" / "model.safetensors")
    for name, value in read_weights(newest, manifest).items():
        assert name not in student or torch.equal(student[name], value)
    assert main([str(base / "cut"), str(base / "one"), str(base / "made2")]) == 1
    assert finish(base, "cut", "trainer=cpu") == 0
    assert gap(result(base, "cut"), result(base, "one")) < 1e-4
    assert losses(base, "cut", "stage2") == pytest.approx(losses(base, "one", "stage2"), rel=1e-5)


def test_a_checkpoint_of_one_process_goes_on_in_two(base: Path) -> None:
    process = start(base, "grown", "trainer=cpu")
    wait_for(base, "grown", "recover/stage2/step_0000002/manifest.json", process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 130
    assert finish(base, "grown", "trainer=fsdp", *TWO) == 0
    assert gap(result(base, "grown"), result(base, "one")) < 1e-4


def test_torchrun_starts_the_processes_too(base: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29517")
    assert finish(base, "torchrun", "trainer=ddp", *TWO, launcher=launcher) == 0
    assert gap(result(base, "torchrun"), result(base, "one")) < 1e-4
    metrics = json.loads((base / "torchrun" / "metrics.json").read_text())
    assert not metrics["recover/reused"]


def test_kills_lose_no_more_than_an_interval_and_change_nothing(base: Path) -> None:
    draw = random.Random(0)
    for _ in range(3):
        process = start(base, "killed", "trainer=cpu")
        step = draw.randint(1, STEPS - 1)
        wait_for(base, "killed", "recover/stage1/*", process)
        deadline = time.time() + draw.uniform(0, 1)
        while process.poll() is None and time.time() < deadline:
            if list((base / "killed").glob(f"recover/stage2/step_{step:07d}/manifest.json")):
                break
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        before = steps_kept(base / "killed")
        again = start(base, "killed", "trainer=cpu")
        time.sleep(draw.uniform(0, 0.3))
        os.killpg(again.pid, signal.SIGKILL)
        again.wait()
        assert steps_kept(base / "killed") >= before
    assert finish(base, "killed", "trainer=cpu") == 0
    assert same(result(base, "killed"), result(base, "one"))
    assert not list((base / "killed" / "recover").rglob(".*"))
    shutil.rmtree(base / "killed")


def steps_kept(folder: Path) -> int:
    """The step that the next run would go on from, stage 2 counted behind stage 1."""
    if (folder / "recover/stage2/done").is_dir():
        return 1000 + STEPS
    for offset, stage in ((1000, "stage2"), (0, "stage1")):
        steps = sorted((folder / "recover" / stage).glob("step_*/manifest.json"))
        if steps:
            return offset + int(steps[-1].parent.name.removeprefix("step_"))
    return 0
