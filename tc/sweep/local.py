"""Jobs on this machine, each a process of its own: one that dies takes no other along."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tc import ui
from tc.sweep.command import problem_of
from tc.sweep.record import Sweep, SweepJob

POLL_S = 0.2


@dataclass
class _Running:
    job: SweepJob
    slot: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    copier: threading.Thread | None


def run_here(
    sweep: Sweep,
    jobs: Sequence[SweepJob],
    command_of: Callable[[SweepJob], list[str]],
    at_a_time: int,
    gpus: int,
) -> None:
    """Runs jobs, so many at a time. One at a time shows what it does; several write it to logs.

    Args:
        sweep: told of each that has ended.
        jobs: to run.
        command_of: what runs one of them.
        at_a_time: so many.
        gpus: of this machine, dealt to the jobs that run; 0 leaves each what there is.
    """
    (sweep.folder / "logs").mkdir(exist_ok=True)
    waiting, running = list(jobs), list[_Running]()
    try:
        while waiting or running:
            free = sorted(set(range(at_a_time)) - {one.slot for one in running})
            while waiting and free:
                job, slot = waiting.pop(0), free.pop(0)
                command, gpu = command_of(job), _share(slot, at_a_time, gpus)
                running.append(_start(sweep, job, slot, command, gpu, at_a_time == 1))
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                if one.copier is not None:
                    one.copier.join()
                one.log.close()
                sweep.ended(one.job, problem_of(one.process.returncode, Path(one.log.name)))
            time.sleep(POLL_S)
    finally:  # Ctrl-C reaches the jobs too; whatever else stops us must not leave them behind
        for one in running:
            one.process.terminate()
        for one in running:
            one.process.wait()


def _share(slot: int, at_a_time: int, gpus: int) -> str | None:
    """The GPUs of one of several jobs that run: its own where there are enough."""
    if not gpus:
        return None
    return ",".join(map(str, range(slot, gpus, at_a_time) or [slot % gpus]))


def _start(
    sweep: Sweep, job: SweepJob, slot: int, command: list[str], gpu: str | None, shown: bool
) -> _Running:
    path = sweep.folder / "logs" / f"{job.number}.log"
    log = open(path, "wb")  # noqa: SIM115 - closed when the job has ended
    where = "" if shown else f"  (log: {path})"
    ui.plain(f"job {job.number}: {' '.join(job.overrides)}{where}")
    environment = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    if not shown:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        return _Running(job, slot, process, log, None)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    copier = threading.Thread(target=_copy, args=(process.stderr, log), daemon=True)
    copier.start()
    return _Running(job, slot, process, log, copier)


def _copy(source: IO[bytes], log: IO[bytes]) -> None:
    """Passes errors on to the screen, and keeps them for the summary."""
    for line in source:
        log.write(line)
        sys.stderr.write(line.decode(errors="replace"))
        sys.stderr.flush()
