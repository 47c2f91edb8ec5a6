"""Sweeps by the real Slurm: jobs that end, fail, are killed, preempted and cancelled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from composing import ROOT

from tc.artifacts import read_manifest

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(900)]

SLURM = ["hydra/launcher=slurm", "hydra.launcher.cpus_per_task=1"]

RECORD = "out/multirun/*/sweep.json"

SHORT = ["experiment=smoke", "trainer.accelerator=cpu"]

LONG = [
    *(*SHORT, "init=copy_only", "stages=[data,initialise,recover,student]"),
    *("recovery.validations=0", "recovery.stage2.sequence_length=32"),
    *("recovery.stage2.lr_rest=1e-3", "recovery.stage2.batch_sequences=2"),
    *("recovery.stage2.tokens=64000", "recovery.checkpoint_tokens=6400"),
]
"""A recovery of 1000 steps, which saves each 100."""


STARTED: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


def sweep(folder: Path, *args: str, name: str = "log") -> subprocess.Popen:
    """Starts a command as a person does, from a folder of its own."""
    places = [f"paths.cache_dir={folder}/cache", f"paths.output_dir={folder}/out"]
    with open(folder / name, "w") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *args, *places],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            stdout=log,
            stderr=log,
        )
    STARTED.append(process)
    return process


def said(folder: Path) -> str:
    return (folder / "log").read_text()


def until(condition: Callable[[], object], process: subprocess.Popen, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)


def record(folder: Path) -> dict:
    (path,) = folder.glob(RECORD)
    return json.loads(path.read_text())


def slurm(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def queue() -> dict[str, str]:
    return dict(line.split() for line in slurm("squeue", "-h", "-r", "-o", "%i %T").splitlines())


def metrics(run: Path) -> dict:
    return json.loads((run / "metrics.json").read_text())


def test_a_grid_of_four_jobs_makes_its_statistics_once(tmp_path: Path) -> None:
    grid = ["init=phase1,closed_form", "init.half_life_scale=0.25,0.5"]
    process = sweep(tmp_path, "-m", *SLURM, *SHORT, "recovery=none", *grid)
    until(lambda: list(tmp_path.glob(RECORD)), process)
    jobs = record(tmp_path)["jobs"]
    assert process.wait(400) == 0, said(tmp_path)
    assert [job["number"] for job in jobs] == [0, 1, 2, 3]
    for shared in ("calibrate", "evaluate_teacher"):
        reused = [metrics(tmp_path / job["run_dir"])[f"{shared}/reused"] for job in jobs]
        assert sorted(reused) == [False, True, True, True], shared
    # The control: what is a job's own, each made.
    assert not any(metrics(tmp_path / job["run_dir"])["initialise/reused"] for job in jobs)
    assert slurm("squeue", "-h") == ""


def test_jobs_that_fail_and_are_cancelled_are_named_with_their_cause(tmp_path: Path) -> None:
    process = sweep(tmp_path, "-m", *SLURM, *SHORT, "eval.tokens=0,128", "align.steps=100000")
    until(lambda: "(Slurm's " in said(tmp_path), process)
    until(lambda: any(job.endswith("_1") for job in queue()), process)
    cancelled = next(job for job in queue() if job.endswith("_1"))
    time.sleep(3)
    slurm("scancel", cancelled)
    assert process.wait(300) == 1
    text = said(tmp_path)
    summary = text[text.index("2 of 2 jobs failed.") :]
    assert "eval.tokens=0: at least 1 is allowed" in summary
    assert "job 1: " in summary and "CANCELLED" in summary
    assert "'hydra.launcher.only=[0,1]'" in summary
    failures = [Path(tmp_path, j["run_dir"], "failed.json") for j in record(tmp_path)["jobs"]]
    assert "at least 1 is allowed" in json.loads(failures[0].read_text())["message"]
    assert failures[1].is_file()


def test_killed_and_preempted_jobs_are_requeued_and_end_as_the_undisturbed(tmp_path: Path) -> None:
    names = ("killed", "lost", "preempted")
    whole = sweep(tmp_path, *LONG, "run_dir=whole", name="whole.log")
    process = sweep(tmp_path, "-m", *SLURM, *LONG, f"run_dir={','.join(names)}")
    steps = {name: tmp_path / name / "recover" / "stage2" for name in names}
    for name in names:
        until(lambda name=name: list(steps[name].glob("step_*")), process)
    run = process_of("run_dir=killed")
    os.kill(run, signal.SIGKILL)  # as the system does where memory runs out
    run = process_of("run_dir=lost")
    os.kill(parent_of(run), signal.SIGKILL)  # and with all that Slurm had started
    os.kill(run, signal.SIGKILL)
    time.sleep(1)
    first = slurm(
        "sbatch", "--parsable", "-o", "/dev/null", "-p", "high", "-c", "4", "--wrap", "sleep 2"
    ).strip()
    until(lambda: first not in queue(), process)

    assert process.wait(400) == 0, said(tmp_path)
    assert whole.wait(300) == 0
    expected = student(tmp_path / "whole")
    for name in names:
        log = (tmp_path / name / "run.log").read_text()
        assert log.count("stage recover") > 1, f"{name} was never requeued"
        assert student(tmp_path / name) == expected
        assert not (tmp_path / name / "failed.json").exists()
    # It had the time to save: so it went on from the step that it was at, and not 100 before.
    assert "SIG" in (tmp_path / "preempted" / "run.log").read_text()
    # The control: less of the same is another student.
    less = ["run_dir=other", "recovery.stage2.tokens=6400"]
    other = sweep(tmp_path, *LONG, *less, name="other.log")
    assert other.wait(300) == 0
    assert student(tmp_path / "other") != expected


def process_of(word: str) -> int:
    """The number of the process that has a word in its command, but for the sweep's own."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:  # it has ended
            continue
        if word in words and "-m" not in words:
            return int(path.parent.name)
    raise AssertionError(f"no process has {word}")


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


def student(run: Path) -> str:
    """The hash of a run's student."""
    manifest = read_manifest(run / "student")
    assert manifest is not None
    return manifest.files["model.safetensors"]["sha256"]
