"""What a sweep's jobs are, written before the first begins, and how they ended."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf

from tc import ui
from tc.artifacts import disk_errors, read_json, write_json
from tc.errors import TCError
from tc.run_folder import describe, forget_failure, read_failure, write_failure

RECORD = "sweep.json"

OF_ALL = ("hydra.launcher", "hydra.sweeper", "hydra.sweep")
"""What a sweep has once, however many jobs it has."""

OF_SIGNALS = ("Interrupted", "Stopped", "KeyboardInterrupt")
"""Kinds of failure that say no more than that something else ended a run."""


@dataclass
class SweepJob:
    """One job of a sweep: an ordinary run.

    Attributes:
        number: from 0, in the sweep.
        overrides: its own command line.
        run_dir: its run folder.
        name: the name of that folder.
    """

    number: int
    overrides: list[str]
    run_dir: str
    name: str


def plan(
    loader: ConfigLoader, sweep: DictConfig, overrides: Sequence[Sequence[str]], first: int
) -> tuple[list[SweepJob], bool]:
    """Composes each job of a batch, as it will compose itself.

    Args:
        loader: Hydra's.
        sweep: the configuration of the sweep as a whole.
        overrides: of each job.
        first: the number of the first one.

    Returns:
        The jobs, and whether they are only to be priced.

    Raises:
        TCError: if a job sets what belongs to the sweep as a whole, such as the launcher's
            partition in one of several experiment files; if two jobs have one run folder.
    """
    jobs, dry = list[SweepJob](), False
    for number, own in enumerate(overrides, first):
        cfg = loader.load_sweep_config(sweep, list(own))
        for key in OF_ALL:
            _require_same(key, sweep, cfg, own)
        folder = Path(str(cfg.run_dir))
        jobs.append(SweepJob(number, list(own), str(folder), folder.name))
        dry = dry or bool(cfg.dry_run)
    if not dry:
        _require_folders_of_their_own(jobs)
    return jobs, dry


def _require_same(key: str, sweep: DictConfig, job: DictConfig, overrides: Sequence[str]) -> None:
    whole, own = (OmegaConf.to_container(OmegaConf.select(cfg, key)) for cfg in (sweep, job))
    assert isinstance(whole, dict) and isinstance(own, dict)
    changed = [name for name in own if own.get(name) != whole.get(name)]
    if changed:
        names = ", ".join(f"{key}.{name!s}" for name in changed)
        raise TCError(
            f"{' '.join(overrides)}: sets {names}, which a "
            "sweep has once for all of its jobs. Give it on the command line, or sweep over one "
            "experiment at a time."
        )


def _require_folders_of_their_own(jobs: Sequence[SweepJob]) -> None:
    first: dict[str, SweepJob] = {}
    for job in jobs:
        other = first.setdefault(job.run_dir, job)
        if other is not job:
            raise TCError(
                f"jobs {other.number} ({' '.join(other.overrides)}) and {job.number} "
                f"({' '.join(job.overrides)}) have one run_dir: {job.run_dir}. Leave run_dir out, "
                "which names each after its configuration; or the two are one and the same run."
            )


@dataclass
class Sweep:
    """A sweep on disk, as `sweep.json`, and how its jobs ended.

    Args:
        folder: of the sweep.
        launcher: `local` or `slurm`.
        only: the numbers of the jobs that are run; empty for all.
    """

    folder: Path
    launcher: str
    only: Sequence[int] = ()
    jobs: list[SweepJob] = field(default_factory=list)
    _failures: dict[int, str | None] = field(default_factory=dict)
    _created: str = field(
        default_factory=lambda: datetime.now().astimezone().isoformat("T", "seconds")
    )

    def add(self, jobs: Sequence[SweepJob]) -> list[SweepJob]:
        """Puts jobs on record, and says which of them are to be run.

        Raises:
            TCError: if the record cannot be written.
        """
        self.jobs += jobs
        chosen = [job for job in jobs if not self.only or job.number in self.only]
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for job in chosen:
                forget_failure(Path(job.run_dir))
        record: dict[str, Any] = {
            "version": 1,
            "created": self._created,
            "launcher": self.launcher,
            "command": self._command([]),
            "jobs": [asdict(job) for job in self.jobs],
        }
        write_json(self.folder / RECORD, record)
        return chosen

    def ended(self, job: SweepJob, problem: str | None) -> None:
        """Takes note of how a job ended, and says so.

        Args:
            job: which.
            problem: what whoever ran it saw; None where it is done. What the run itself has left
                word of says more, unless that is of a signal; where it has left none, this is left
                for a report.
        """
        if problem is None:
            self._failures[job.number] = None
            ui.plain(f"job {job.number} is done: {job.run_dir}")
            return
        failure = read_failure(Path(job.run_dir))
        if failure is None or failure["kind"] in OF_SIGNALS:
            stage = failure["stage"] if failure else ""
            failure = {**describe(TCError(problem), stage), "kind": "job"}
            write_failure(Path(job.run_dir), failure)
        self._failures[job.number] = failure["message"]
        print(f"\njob {job.number} failed: {failure['message']}\n", file=sys.stderr, flush=True)

    def finish(self, batch: Sequence[SweepJob]) -> None:
        """Sums up a batch whose jobs have all ended.

        Raises:
            TCError: if one has failed.
        """
        failed = [job for job in batch if self._failures[job.number] is not None]
        rows = [[job.number, "failed" if job in failed else "done", job.run_dir] for job in batch]
        ui.table(f"sweep {self.folder}", ["job", "", "run"], rows)
        if not failed:
            return
        lines = [f"{len(failed)} of {len(batch)} jobs failed."]
        lines += [f"  job {job.number}: {self._failures[job.number]}" for job in failed]
        lines += [f"This runs {'it' if len(failed) == 1 else 'them'} again:"]
        lines += [f"  {shlex.join(self._command([job.number for job in failed]))}"]
        raise TCError("\n".join(lines))

    def _command(self, only: Sequence[int]) -> list[str]:
        """The words of this sweep's command, for some of its jobs or all."""
        words = [word for word in sys.argv[1:] if not word.startswith("hydra.launcher.only=")]
        some = [f"hydra.launcher.only=[{','.join(map(str, only))}]"] if only else []
        return ["python", os.path.relpath(sys.argv[0]), *words, *some]


def perplexity_of(run_dir: Path) -> float | None:
    """What a finished run hands to a sweeper: its student's perplexity, if that was measured."""
    try:
        value = read_json(run_dir / "metrics.json").get("student/perplexity")
    except (OSError, TCError):
        return None
    return None if value is None else float(value)
