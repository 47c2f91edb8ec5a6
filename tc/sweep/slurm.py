"""Jobs as one Slurm array: submitted by submitit, and waited for.

Nothing here asks for accounting, which many clusters have off: a job that has left no result and is
gone from the queue has been killed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError, pickle_load

from tc import ui
from tc.errors import TCError
from tc.sweep import task
from tc.sweep.command import last_words, problem_of
from tc.sweep.record import Sweep, SweepJob

POLL_S = 1.0
"""How often results are looked for."""

ASK_S = 5.0
"""How often the queue is asked for jobs that have left no result."""

GONE_S = 15.0
"""A job without a result that has been out of the queue for so long has failed."""

ALIVE = {
    *("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "PREEMPTED"),
    *("RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("RESV_DEL_HOLD", "SPECIAL_EXIT"),
}
"""States of a job that will still come to an end, as `squeue` writes them."""

OWN = ("_target_", "only", "max_num_kills", "max_num_timeout", "submitit_folder")
"""Options that are not submitit's parameters."""

OF_ANY_CLUSTER = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes"),
    *("name", "stderr_to_stdout"),
)
"""Parameters that submitit takes without the prefix `slurm_`."""


def require_slurm() -> None:
    """Checks that jobs can be submitted here.

    Raises:
        TCError: if not.
    """
    missing = [name for name in ("sbatch", "srun", "squeue", "scontrol") if not shutil.which(name)]
    if missing:
        raise TCError(
            f"hydra/launcher=slurm needs Slurm's {', '.join(missing)}, which this machine does not "
            "have. Run it where jobs are submitted; hydra/launcher=local is for one machine."
        )


def run_on_slurm(
    sweep: Sweep,
    jobs: Sequence[SweepJob],
    command_of: Callable[[SweepJob], list[str]],
    options: Mapping[str, Any],
) -> None:
    """Submits jobs as one array and waits for all of them.

    Args:
        sweep: told of each that has ended.
        jobs: to run.
        command_of: what runs one of them.
        options: of the launcher.

    Raises:
        TCError: if Slurm refuses the array.
    """
    kills = sweep.folder.resolve() / "kills"
    kills.mkdir(exist_ok=True)
    limit = int(options["max_num_kills"])
    tasks = [task.Task(command_of(job), os.getcwd(), str(kills), limit) for job in jobs]
    submitted = _submit(tasks, options, task.teardown(shlex.quote(str(kills)), limit))
    for job, handle in zip(jobs, submitted, strict=True):
        ui.plain(f"job {job.number}: {' '.join(job.overrides)}  (Slurm's {handle.job_id})")
    array = submitted[0].job_id.split("_")[0]
    ui.plain(f"logs: {submitted[0].paths.folder.parent}; to stop all: scancel {array}")
    try:
        _Waiting(sweep, array, dict(zip([h.job_id for h in submitted], jobs, strict=True))).wait(
            {handle.job_id: handle for handle in submitted}
        )
    except KeyboardInterrupt:
        ui.plain(f"the jobs go on without this command; to stop them: scancel {array}")
        raise


def _submit(
    tasks: Sequence[task.Task], options: Mapping[str, Any], teardown: list[str]
) -> list[submitit.Job[int]]:
    cloudpickle.register_pickle_by_value(task)
    parameters: dict[str, Any] = {
        key if key in OF_ANY_CLUSTER else f"slurm_{key}": value
        for key, value in options.items()
        if key not in OWN and value is not None
    }
    # Slurm requeues what it preempts only where a job allows it.
    more = {"requeue": True, **parameters.pop("slurm_additional_parameters", {})}
    try:
        executor = submitit.AutoExecutor(
            folder=Path(options["submitit_folder"]).resolve(),
            cluster="slurm",
            slurm_max_num_timeout=options["max_num_timeout"],
        )
        executor.update_parameters(
            **parameters, slurm_additional_parameters=more, slurm_teardown=teardown
        )
        with executor.batch():
            return [executor.submit(one) for one in tasks]
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        raise TCError(f"Slurm refuses the jobs: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The line of sbatch's that says why."""
    lines = [line.strip() for line in str(error).splitlines() if "error:" in line]
    return lines[-1] if lines else str(error)


class _Waiting:
    """Waits for the jobs of one array.

    Args:
        sweep: told of each that has ended.
        array: Slurm's number of it.
        jobs: by Slurm's number.
    """

    def __init__(self, sweep: Sweep, array: str, jobs: Mapping[str, SweepJob]) -> None:
        self.sweep, self.array, self.jobs = sweep, array, jobs
        self._states: dict[str, str] = {}
        self._gone: dict[str, float] = {}
        self._asked = 0.0
        self._told = ""

    def wait(self, handles: Mapping[str, submitit.Job[int]]) -> None:
        """Returns when each job has left a result or is gone."""
        left = dict(handles)
        while left:
            time.sleep(POLL_S)
            if time.monotonic() - self._asked > ASK_S:
                self._ask()
            for number, handle in list(left.items()):
                # Looked for after the queue was asked: a job that has ended has left it by then.
                if handle.paths.result_pickle.exists():
                    problem = _problem(handle)
                elif self._is_gone(number):
                    problem = self._obituary(number, handle)
                else:
                    continue
                del left[number]
                self.sweep.ended(self.jobs[number], problem)

    def _ask(self) -> None:
        self._asked = time.monotonic()
        command = ["squeue", "-h", "-r", "-t", "all", "-j", self.array, "-o", "%i %T"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode and "Invalid job id" not in said.stderr:
            self._say_once(f"squeue does not answer, waiting: {said.stderr.strip()}")
            return
        states = dict(line.split(maxsplit=1) for line in said.stdout.splitlines())
        self._states.update(states)
        for number in self.jobs:
            if states.get(number) in ALIVE:
                self._gone.pop(number, None)
            else:
                self._gone.setdefault(number, self._asked)

    def _say_once(self, text: str) -> None:
        if text != self._told:
            ui.plain(text)
        self._told = text

    def _is_gone(self, number: str) -> bool:
        return number in self._gone and time.monotonic() - self._gone[number] > GONE_S

    def _obituary(self, number: str, handle: submitit.Job[int]) -> str:
        state = self._states.get(number, "gone from the queue")
        said = last_words(handle.paths.stderr) or last_words(handle.paths.stdout) or "none"
        return f"Slurm's job {number} ended without a result ({state}); its last words: {said}"


def _problem(handle: submitit.Job[int]) -> str | None:
    """What a job's result says of its end; None where it is done."""
    outcome, result = pickle_load(handle.paths.result_pickle)
    if outcome == "error":
        return str(result).strip().rpartition("\n")[2]
    return problem_of(result, handle.paths.stderr)
