"""Locks between processes: one at a time, the holder is named, a dead process holds nothing."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tc.errors import TCError
from tc.locks import locked

HOLD = """
import sys
from pathlib import Path
from tc.locks import locked
with locked(Path(sys.argv[1]), "the thing"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the lock of `tmp_path / "thing"` until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "thing")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_held_lock_is_refused_and_its_holder_named(holder, tmp_path: Path) -> None:
    with pytest.raises(TCError, match=rf"the thing is in use by .*process {holder.pid} on "):
        with locked(tmp_path / "thing", "the thing", wait=False):
            pass
    with locked(tmp_path / "another", "another", wait=False):  # the control
        pass


def test_waiting_is_said_once_and_ends_with_the_holder(holder, tmp_path: Path) -> None:
    said: list[str] = []
    ended = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        assert holder.poll() is None
        threading.Thread(target=lambda: (ended.set(), holder.stdin.close())).start()

    with locked(tmp_path / "thing", "the thing", say=say):
        assert ended.is_set()
    assert len(said) == 1
    assert said[0].startswith("waiting for the thing, made by ")
    assert f"process {holder.pid} on " in said[0]


def test_a_killed_process_holds_nothing(holder, tmp_path: Path) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / ".thing.holder").exists()  # it could not tidy up
    with locked(tmp_path / "thing", "the thing", wait=False):
        pass
    assert not (tmp_path / ".thing.holder").exists()


def test_a_job_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    with locked(tmp_path / "thing", "the thing"):
        assert "job 41 (process " in (tmp_path / ".thing.holder").read_text()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "40")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    with locked(tmp_path / "thing", "the thing"):
        assert "job 40_1 (process " in (tmp_path / ".thing.holder").read_text()


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("tc.locks.FileLock.acquire", refuse)
    said: list[str] = []
    with locked(tmp_path / "thing", "the thing", say=said.append):
        pass
    assert "no file locks" in said[0]
