"""Locks between processes, on one machine or several that share a file system.

A lock is the kernel's own (`flock`, which NFS hands to its server), so that it ends with the
process that holds it, however that ends: no lock is ever stale, and nobody has to break one. Who
holds it is written beside it, for whoever waits.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from tc.errors import TCError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system says that has no locks."""

POLL_S = 0.5
"""How often a waiting process tries again."""


@contextmanager
def locked(
    path: Path,
    what: str,
    wait: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[None]:
    """Holds the lock of a path, so that only one process at a time is in here.

    It is a file beside the path, which need not exist: `.NAME.lock`, which stays. Where the file
    system has no locks at all this is said, and nothing is held.

    Args:
        path: what is locked.
        what: its name, for messages.
        wait: whether to wait for another process that holds it.
        say: told once that it waits, and for whom.

    Raises:
        TCError: if another process holds it and `wait` is false, saying which.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.parent / f".{path.name}.lock")
    holder = path.parent / f".{path.name}.holder"
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise TCError(
                f"{what} is in use by {_read(holder)} ({path.parent}/.{path.name}.lock). Wait for "
                "it to end, or stop it."
            ) from None
        say(f"waiting for {what}, made by {_read(holder)}")
        lock.acquire(poll_interval=POLL_S)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        say(f"{path.parent} has no file locks: {what} may be made more than once")
        yield
        return
    try:
        _write(holder)
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def this_process() -> str:
    """This process as a person knows it: job, number, machine."""
    job = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{job}_{os.environ['SLURM_ARRAY_TASK_ID']}" if job else os.environ.get("SLURM_JOB_ID")
    process = f"process {os.getpid()} on {socket.gethostname()}"
    return f"job {job} ({process})" if job else process


def _write(holder: Path) -> None:
    facts = {"who": this_process(), "since": datetime.now().astimezone().isoformat("T", "seconds")}
    holder.write_text(json.dumps(facts) + "\n", encoding="utf-8")


def _read(holder: Path) -> str:
    """Who holds a lock; it may have ended, or only just begun, while this is read."""
    try:
        facts = json.loads(holder.read_text(encoding="utf-8"))
        return f"{facts['who']} since {facts['since']}"
    except (OSError, ValueError, KeyError):
        return "another process"
