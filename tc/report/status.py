"""How far runs have come, and what of a sweep is still to be run."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tc.artifacts import read_json
from tc.errors import TCError

FAILED, SWEEP = "failed.json", "sweep.json"

IDLE_S = 600.0
"""A run that has written nothing for so long is taken for stopped, where no lock tells more."""

LEAVES = ("data", "student", "evaluate")
"""Stages that leave their seconds in the metrics of every run that they were part of."""

WRITES = (
    *("run.log", "curves/metrics.csv"),
    *("data", "init", "align", "select", "blocks", "student", "evaluate"),
    *("recover/stage1", "recover/stage2"),
)
"""Whose times tell when a run has last done something, besides the folder's own."""

TAKES_ONLY = ("local", "slurm")
"""Launchers that run the jobs of `hydra.launcher.only=[...]` alone."""


class State(Enum):
    """How far a run has come."""

    done = "done"
    running = "running"
    stopped = "stopped"
    failed = "failed"
    missing = "missing"


@dataclass(frozen=True)
class Status:
    """How far a run has come, and how that is known.

    Attributes:
        state: done, running, stopped, failed or missing.
        why: how it is known; of a failed run its message.
        stage: the stage that it failed or was last seen in, or empty.
    """

    state: State
    why: str
    stage: str = ""


def status_of(
    path: Path, science: Mapping[str, Any], metrics: Mapping[str, Any], now: float | None = None
) -> Status:
    """How far a run has come.

    `metrics.json` is written at a run's end, and a failed run says so. Between the two only signs
    tell a run that works from one that was killed: a lock that this machine sees held, or else when
    something was last written. A run on another machine that writes nothing for long, in a long
    stage, is taken for stopped.

    Args:
        path: the run folder.
        science: its flat configuration; empty where there is none.
        metrics: its metrics; empty where there are none.
        now: the time in seconds; the present one by default.
    """
    if (path / FAILED).is_file():
        return _failure(path / FAILED)
    stage = _last_stage(path)
    if metrics:
        lacking = [s for s in _stages(path) if s in LEAVES and f"{s}/seconds" not in metrics]
        if not lacking:
            return Status(State.done, "metrics.json is there")
    if not science:
        return Status(State.missing, "no run has begun here; it may wait in a queue")
    if _is_locked(path):
        return Status(State.running, "a process of this machine holds its lock", stage)
    idle = (time.time() if now is None else now) - _last_write(path)
    if idle < IDLE_S:
        return Status(State.running, f"it wrote something {_ago(idle)} ago", stage)
    return Status(State.stopped, f"it is not finished and wrote nothing for {_ago(idle)}", stage)


def _failure(path: Path) -> Status:
    try:
        facts = read_json(path)
        message, kind = str(facts.get("message", "")), str(facts.get("kind", ""))
        return Status(State.failed, message or kind or "no reason given", str(facts["stage"] or ""))
    except (TCError, AttributeError, KeyError) as error:
        return Status(State.failed, f"{FAILED} is there and cannot be read ({error})")


def _stages(path: Path) -> list[str]:
    """The stages that the run was to have, by `config.yaml`; all that matter where it is absent."""
    import yaml

    try:
        text = (path / "config.yaml").read_text(encoding="utf-8")
        begin = text.index("\nstages:") + 1
        # Only this key: the whole file takes a hundred times as long, for hundreds of runs.
        lines = [text[begin:].splitlines()[0]]
        lines += [s for s in text[begin:].splitlines()[1:12] if s.lstrip().startswith("- ")]
        stages = yaml.safe_load("\n".join(lines))["stages"]
        return [str(stage) for stage in stages]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return list(LEAVES)


def _last_stage(path: Path) -> str:
    """The stage that the log named last."""
    try:
        with open(path / "run.log", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    marks = [line.rsplit(": stage ", 1)[1] for line in lines if ": stage " in line]
    return marks[-1].strip() if marks else ""


def _last_write(path: Path) -> float:
    times = [path.stat().st_mtime]
    for name in WRITES:
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _is_locked(path: Path) -> bool:
    """Whether a process of this machine holds the run folder's lock, found without taking it."""
    inodes = set()
    for lock in (path.parent / f".{path.name}.lock", path / ".lock"):
        try:
            facts = lock.stat()
        except OSError:
            continue
        inodes.add(f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}")
    if not inodes:
        return False
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    # Such as `1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF`; a waiting process has an arrow.
    return any(inodes & set(line.split()) and "->" not in line for line in lines)


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


@dataclass(frozen=True)
class Job:
    """A job of a sweep.

    Attributes:
        number: from 0, in the sweep.
        name: of its run folder.
        overrides: its own command line.
        path: its run folder, which may not be there.
        status: how far it has come.
    """

    number: int
    name: str
    overrides: list[str]
    path: Path
    status: Status


@dataclass(frozen=True)
class Sweep:
    """A sweep's jobs, as its `sweep.json` has them, and how far they have come.

    Attributes:
        path: the folder of the sweep.
        launcher: what ran it.
        created: when, ISO 8601, or empty.
        command: its words.
        jobs: in order.
    """

    path: Path
    launcher: str
    created: str
    command: list[str]
    jobs: list[Job]

    def count(self, state: State) -> int:
        """The jobs in a state."""
        return sum(job.status.state is state for job in self.jobs)

    @property
    def unfinished(self) -> list[Job]:
        """The jobs that are neither done nor running."""
        return [job for job in self.jobs if job.status.state not in (State.done, State.running)]

    @property
    def commands(self) -> list[str]:
        """What runs just the jobs that are neither done nor running; nothing where there are none.

        One command where the launcher can be told which jobs; else one a job, which any shell runs.
        """
        jobs = self.unfinished
        if not jobs:
            return []
        if self.launcher in TAKES_ONLY and self.command:
            words = [w for w in self.command if not w.startswith("hydra.launcher.only=")]
            numbers = ",".join(str(job.number) for job in jobs)
            return [shlex.join([*words, f"hydra.launcher.only=[{numbers}]"])]
        program = list(_program(self.command))
        return [shlex.join([*program, *job.overrides]) for job in jobs]


def _program(command: Iterable[str]) -> Iterable[str]:
    """The words of a command up to its script; `python run.py` where that is not to be seen."""
    words = []
    for word in command:
        words.append(word)
        if word.endswith(".py"):
            return words
    return ["python", "run.py"]


def sweep_paths(folder: Path) -> list[Path]:
    """The run folders of a sweep that are there; none where its record cannot be read."""
    try:
        record = _record(folder)
    except TCError:
        return []
    return [path for path in (_place(folder, job) for job in record["jobs"]) if path.is_dir()]


def read_sweep(folder: Path, now: float | None = None) -> Sweep:
    """Reads a sweep's `sweep.json`, and looks how far each job has come.

    Raises:
        TCError: if the record cannot be read.
    """
    record = _record(folder)
    jobs = []
    for position, job in enumerate(record["jobs"]):
        path = _place(folder, job)
        number, overrides = job.get("number", position), job.get("overrides", [])
        if not isinstance(number, int) or not isinstance(overrides, list):
            raise TCError(f"{folder / SWEEP} is damaged: job {position} is no job.")
        name = str(job.get("name") or path.name)
        status = _status_at(path, now)
        jobs.append(Job(number, name, [str(word) for word in overrides], path, status))
    command = record.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    launcher, created = str(record.get("launcher", "")), str(record.get("created", ""))
    return Sweep(folder, launcher, created, words, jobs)


def _status_at(path: Path, now: float | None) -> Status:
    try:
        both = [
            read_json(path / name) if (path / name).is_file() else {}
            for name in ("science.json", "metrics.json")
        ]
        return status_of(path, both[0], both[1], now)
    except (TCError, OSError, TypeError) as error:
        return Status(State.failed, f"its folder is damaged: {error}")


def _record(folder: Path) -> dict[str, Any]:
    path = folder / SWEEP
    record = read_json(path)
    jobs = record.get("jobs") if isinstance(record, dict) else None
    whole = isinstance(jobs, list) and all(
        isinstance(job, dict) and isinstance(job.get("run_dir"), str) for job in jobs
    )
    if not whole:
        raise TCError(f"{path} is damaged: it has no list of jobs with a run_dir each.")
    if record.get("version") != 1:
        raise TCError(f"{path} has version {record.get('version')}; this program reads version 1.")
    return record


def _place(folder: Path, job: Mapping[str, Any]) -> Path:
    """The run folder of a job: from here, or from where the sweep's folder has been moved to."""
    told = Path(job["run_dir"])
    if told.is_absolute() or told.is_dir():
        return told
    above = [folder.resolve(), *folder.resolve().parents]
    for place in [*(base / told for base in above), folder / told.name]:
        if place.is_dir():
            return place
    return told
