"""How far runs and sweeps have come, and the command that runs what is missing."""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from pathlib import Path

import pytest
from report_helpers import write, write_run, write_sweep

from tc.errors import TCError
from tc.report.runs import read_run
from tc.report.status import IDLE_S, State, read_sweep

LATER = time.time() + 3 * 3600
FAILURE = {"stage": "align", "kind": "TCError", "message": "no space left", "time": "now"}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Done, failed, stopped and missing."""
    places = [tmp_path / name for name in ("done", "failed", "stopped", "missing")]
    write_run(places[0])
    write_run(places[1], None)
    write(places[1] / "failed.json", FAILURE)
    write_run(places[2], None)
    write(
        places[2] / "run.log", "x INFO tc.pipeline: stage data\nx INFO tc.pipeline: stage align\n"
    )
    overrides = [["init=full", f"seed={i}", "policy.keep=[0,4]"] for i in range(4)]
    write_sweep(tmp_path / "sweep", list(zip(places, overrides, strict=True)))
    return tmp_path


def test_each_state_and_why(sweep: Path) -> None:
    found = read_sweep(sweep / "sweep", LATER)
    states = [job.status.state for job in found.jobs]
    assert states == [State.done, State.failed, State.stopped, State.missing]
    assert found.jobs[1].status.why == "no space left"
    assert found.jobs[1].status.stage == "align"
    assert found.jobs[2].status.stage == "align"
    assert "wrote nothing for" in found.jobs[2].status.why


def test_recent_activity_is_running_and_silence_is_not(sweep: Path) -> None:
    now = time.time()
    assert read_sweep(sweep / "sweep", now + IDLE_S / 2).jobs[2].status.state is State.running
    assert read_sweep(sweep / "sweep", now + 2 * IDLE_S).jobs[2].status.state is State.stopped


@pytest.mark.skipif(not Path("/proc/locks").is_file(), reason="needs Linux")
def test_a_held_lock_is_running_however_silent(sweep: Path) -> None:
    with open(sweep / ".stopped.lock", "w") as lock:
        assert read_sweep(sweep / "sweep", LATER).jobs[2].status.state is State.stopped
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_sweep(sweep / "sweep", LATER).jobs[2].status.state is State.running


def test_a_finished_part_of_the_stages_is_done_and_no_more(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", None)
    write(run / "metrics.json", {"data/seconds": 1.0})
    assert read_run(run, LATER).status.state is State.stopped
    write(run / "config.yaml", "seed: 0\nstages:\n- data\nrun_dir: x\n")
    assert read_run(run, LATER).status.state is State.done


def test_commands_run_just_what_is_missing(sweep: Path) -> None:
    commands = read_sweep(sweep / "sweep", LATER).commands
    assert [shlex.split(command)[:2] for command in commands] == [["python", "run.py"]] * 3
    assert [shlex.split(command)[3] for command in commands] == ["seed=1", "seed=2", "seed=3"]
    assert shlex.split(commands[0])[4] == "policy.keep=[0,4]"
    assert "-m" not in shlex.split(commands[0])


def test_a_launcher_that_knows_jobs_gets_one_command(sweep: Path) -> None:
    record = sweep / "sweep" / "sweep.json"
    write(record, record.read_text().replace('"basic"', '"slurm"'))
    (command,) = read_sweep(sweep / "sweep", LATER).commands
    words = ["python", "run.py", "-m", "init=full,phase1", "hydra.launcher.only=[1,2,3]"]
    assert shlex.split(command) == words


def test_nothing_is_left_to_run(tmp_path: Path) -> None:
    write_sweep(tmp_path, [(write_run(tmp_path / "done"), [])])
    assert read_sweep(tmp_path).commands == []


def test_a_sweep_that_was_moved_is_found_by_its_relative_folders(sweep: Path) -> None:
    (sweep / "away").mkdir()
    (sweep / "sweep").rename(sweep / "away" / "sweep")
    (sweep / "done").rename(sweep / "away" / "done")
    record = sweep / "away" / "sweep" / "sweep.json"
    write(record, record.read_text().replace(f"{sweep}{os.sep}", ""))
    found = read_sweep(sweep / "away" / "sweep", LATER)
    assert found.jobs[0].status.state is State.done


@pytest.mark.parametrize(
    "text", ["", "[]", '{"jobs": 1}', '{"jobs": [{"run_dir": 3}]}', '{"version": 2, "jobs": []}']
)
def test_a_damaged_record_is_one_message(tmp_path: Path, text: str) -> None:
    write(tmp_path / "sweep.json", text)
    with pytest.raises(TCError, match=r"sweep\.json"):
        read_sweep(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"stage": null}'])
def test_a_failure_is_one_however_it_is_written(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path / "run")
    write(run / "failed.json", text)
    assert read_run(run).status.state is State.failed
