"""A sweep from its first job to its summary, by one launcher or the other."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from tc.errors import TCError
from tc.sweep.command import command_of
from tc.sweep.local import run_here
from tc.sweep.record import Sweep, SweepJob, perplexity_of, plan


class Launch(ABC):
    """What a launcher does with the jobs that a sweeper hands it, in one batch or several.

    Args:
        loader: Hydra's.
        config: the configuration of the sweep as a whole.
        options: of the launcher, as `conf/hydra/launcher/` documents them.
    """

    name: ClassVar[str]

    def __init__(
        self, loader: ConfigLoader, config: DictConfig, options: Mapping[str, Any]
    ) -> None:
        self.loader, self.config, self.options = loader, config, options
        only = list(options["only"] or [])
        self.sweep = Sweep(Path(str(config.hydra.sweep.dir)), self.name, only)

    def batch(self, overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn] | None:
        """Runs a batch of jobs to its summary.

        Args:
            overrides: of each job.
            first: the number of the first one.

        Returns:
            How each ended; None where they are only to be priced, which takes no processes.

        Raises:
            TCError: if they cannot be run, before any is; if one has failed, when all have ended.
        """
        jobs, dry = plan(self.loader, self.config, overrides, first)
        if dry:
            return None
        self.check()
        chosen = self.sweep.add(jobs)
        if not chosen:
            raise TCError(
                f"hydra.launcher.only={list(self.sweep.only)} names none of the jobs {first} to "
                f"{first + len(jobs) - 1} of this sweep."
            )
        self.run(chosen)
        self.sweep.finish(chosen)
        return [_returned(job) for job in jobs]

    @abstractmethod
    def check(self) -> None:
        """Refuses what cannot work, before anything is written."""

    @abstractmethod
    def run(self, jobs: list[SweepJob]) -> None:
        """Runs jobs, and tells the sweep how each has ended."""

    def command(self, job: SweepJob) -> list[str]:
        """What runs a job as an ordinary run."""
        return command_of(self.config, job.overrides)


class LocalLaunch(Launch):
    """Jobs on this machine."""

    name = "local"

    def check(self) -> None:
        """Refuses a number of jobs that is none."""
        at_a_time = self.options["at_a_time"]
        if not isinstance(at_a_time, int) or at_a_time < 1:
            raise TCError(
                f"hydra.launcher.at_a_time={at_a_time}: a whole number from 1 is allowed."
            )

    def run(self, jobs: list[SweepJob]) -> None:
        """Runs so many jobs at a time, and deals them the GPUs."""
        at_a_time = self.options["at_a_time"]
        gpus = torch.cuda.device_count() if at_a_time > 1 else 0
        run_here(self.sweep, jobs, self.command, at_a_time, gpus)


class SlurmLaunch(Launch):
    """Jobs as one Slurm array."""

    name = "slurm"

    def check(self) -> None:
        """Refuses to go on without Slurm or the packages that talk to it."""
        if importlib.util.find_spec("submitit") is None:
            raise TCError(
                "hydra/launcher=slurm needs the packages hydra-submitit-launcher and submitit: "
                "pip install 'taylor-calibrate[slurm]'."
            )
        from tc.sweep.slurm import require_slurm

        require_slurm()

    def run(self, jobs: list[SweepJob]) -> None:
        """Submits the array, and waits for each of its jobs."""
        from tc.sweep.slurm import run_on_slurm

        run_on_slurm(self.sweep, jobs, self.command, self.options)


def _returned(job: SweepJob) -> JobReturn:
    returned = JobReturn(overrides=job.overrides, status=JobStatus.COMPLETED)
    returned.return_value = perplexity_of(Path(job.run_dir))
    return returned
