"""One job of a sweep, as it runs in the cluster: `run.py` as a process, and an ear for Slurm.

This file travels to the cluster by value, inside what submitit pickles: it must import nothing of
this package, so that a job starts the same wherever it is.

Slurm sends its signals to all processes of a job. On one that ends a run early, `run.py` saves what
it has and ends; the task then asks Slurm to requeue the job, whose next start finds its run folder
and goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission

STOPPED = (130, -signal.SIGTERM, -signal.SIGUSR1, -signal.SIGUSR2, -signal.SIGHUP)
"""How a run ends that a signal stopped: by itself, or before it could hear."""

SETTLE_S = 2.0
"""How long a stopped job waits for submitit's own handler, and for Slurm to say why."""


class Task:
    """One job of a sweep, as submitit's process in the cluster calls it.

    Args:
        command: what runs it.
        folder: where that is run.
        kills: a folder that counts how often each job was killed.
        max_num_kills: so often it is requeued all the same.
    """

    def __init__(self, command: list[str], folder: str, kills: str, max_num_kills: int) -> None:
        self.command, self.folder = command, folder
        self.kills, self.max_num_kills = kills, max_num_kills
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Runs the job; gives its exit status once it is done, failed, or stopped for good."""
        signal.signal(signal.SIGTERM, self._pass_on)
        environment = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
        self._process = subprocess.Popen(self.command, cwd=self.folder, env=environment)
        while (status := self._process.poll()) is None:
            time.sleep(0.2)
        if submitit.JobEnvironment().global_rank > 0:
            return status
        if status in STOPPED:
            # On SIGUSR2, submitit's own handler is about to requeue, and ends this process.
            time.sleep(SETTLE_S)
            if self._is_meant_to_run():
                self._requeue("a signal stopped it")
        if status == -signal.SIGKILL and self._is_meant_to_run() and self._may_be_killed_again():
            self._requeue("it was killed")
        return status

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Hands a signal to the run, which may have it already."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def checkpoint(self) -> DelayedSubmission:
        """What submitit requeues when a job is preempted or its time is up: the same again."""
        process = self._process
        if process is not None and process.returncode is None:
            self._pass_on(signal.SIGUSR2, None)
            # Not `wait`: this runs inside a signal handler, which may have interrupted `poll`.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(self)

    def _may_be_killed_again(self) -> bool:
        """Counts a kill; the batch script does the same where the whole job step was killed."""
        path = Path(self.kills) / os.environ["SLURM_JOB_ID"]
        with open(path, "a", encoding="utf-8") as file:
            file.write("killed\n")
        return len(path.read_text(encoding="utf-8").splitlines()) <= self.max_num_kills

    def _is_meant_to_run(self) -> bool:
        """Whether Slurm still wants this job: not if a person cancelled it or its time is up."""
        command = ["squeue", "-h", "-t", "all", "-j", os.environ["SLURM_JOB_ID"], "-o", "%T"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        return said.stdout.strip() in ("RUNNING", "PREEMPTED", "SIGNALING")

    def _requeue(self, why: str) -> None:
        job = os.environ["SLURM_JOB_ID"]
        print(f"{why}: job {job} is requeued", flush=True)
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
        sys.exit(-1)  # without a result, which would be the job's

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}


def teardown(kills: str, max_num_kills: int) -> list[str]:
    """Lines at the end of a batch script: a job whose step was killed is requeued, so often."""
    return [
        "status=$?",
        f'count={kills}/"$SLURM_JOB_ID"',
        "if [ $status -eq 137 ]; then",
        '  echo killed >> "$count"',
        f'  if [ "$(wc -l < "$count")" -le {max_num_kills} ]; then',
        '    echo "it was killed: job $SLURM_JOB_ID is requeued"',
        '    scontrol requeue "$SLURM_JOB_ID" && sleep 60',
        "  fi",
        "fi",
        "exit $status",
    ]
