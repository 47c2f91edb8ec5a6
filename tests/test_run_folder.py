"""What several processes of one run know of each other through its folder."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from composing import composed

import tc.run_folder
from tc.errors import TCError
from tc.run_folder import SIGN, Pulse, RunFolder


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tc.run_folder, "BEAT_S", 0.01)


def test_others_go_on_once_the_first_process_is_at_work(tmp_path: Path) -> None:
    cfg = composed("experiment=smoke", f"run_dir={tmp_path}")
    waiting = threading.Thread(target=Pulse(tmp_path).wait, daemon=True)
    waiting.start()
    folder = RunFolder(tmp_path, cfg, resume=True)
    waiting.join(0.2)
    assert waiting.is_alive()  # an open folder alone is no sign
    with folder.alive():
        waiting.join(20)
        assert not waiting.is_alive()
    assert not (tmp_path / SIGN).exists()


def test_the_sign_of_an_earlier_run_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / SIGN).touch()
    pulse = Pulse(tmp_path)
    assert not pulse.listen()
    os.utime(tmp_path / SIGN, (1, 1))
    assert pulse.listen()
    assert not pulse.listen()


def test_a_first_process_that_is_gone_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse = Pulse(tmp_path)
    assert not pulse.listen()
    monkeypatch.setattr(tc.run_folder, "PATIENCE_S", 0.0)
    with pytest.raises(TCError, match="nothing has been heard of the run's first process"):
        pulse.wait()


def test_a_worker_of_other_settings_is_told_them(tmp_path: Path) -> None:
    options = ["experiment=smoke", "policy=greedy", "policy.count=2", "policy.workers=2"]
    options += [f"run_dir={tmp_path}", "policy.worker=1"]
    RunFolder(tmp_path, composed(*options[:-1]), resume=True)
    assert RunFolder.to_help(tmp_path, composed(*options)).path == tmp_path
    with pytest.raises(TCError, match=r"(?s)Give all workers the same:.*seed: 0 -> 7"):
        RunFolder.to_help(tmp_path, composed(*options, "seed=7"))
