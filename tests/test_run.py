"""`run.py` as a person calls it: exit status, one message, no traceback, nothing half-written."""

from __future__ import annotations

import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from composing import ROOT


def call(
    folder: Path, *args: str, before: Callable[[], None] | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    places = [f"paths.cache_dir={folder}/cache", f"paths.output_dir={folder}/out"]
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *args, "experiment=smoke", *places],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        preexec_fn=before,
        check=False,
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("teacher.nme=x", "allowed: name, source, path"),
        ("seed=abc", "could not be converted to Integer"),
        ("policy=every3", "every2"),
        ("eval.stride=0", "eval.stride=0: at least 1 is allowed"),
    ],
)
def test_a_wrong_configuration(override: str, message: str, tmp_path: Path) -> None:
    done = call(tmp_path, override)
    assert done.returncode == 1
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_tracebacks_are_there_when_asked_for(tmp_path: Path) -> None:
    done = call(tmp_path, "eval.stride=0", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_sweep_goes_on_after_a_failed_job_and_says_so(tmp_path: Path) -> None:
    done = call(tmp_path, "-m", "eval.tokens=0,128")
    assert done.returncode == 1
    assert "eval.tokens=0: at least 1 is allowed" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(list(tmp_path.glob("out/*/metrics.json"))) == 1
    summary = done.stderr[done.stderr.index("1 of 2 jobs failed.") :]
    assert "eval.tokens=0: at least 1 is allowed" in summary
    assert "hydra.launcher.only=[0]" in summary
    assert len(list(tmp_path.glob("out/*/failed.json"))) == 1
    assert len(list(tmp_path.glob("out/multirun/*/sweep.json"))) == 1


def test_a_full_disk_loses_nothing_and_the_run_continues(tmp_path: Path) -> None:
    """Files of at most 200 kB: tokens and mixers fit, the student (471 kB) does not."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    # As many tokens as give small captures.
    small = ["data.calibration_tokens=128", "run_dir=run"]
    done = call(tmp_path, *small, before=limit)
    assert done.returncode == 1
    assert "Nothing was half-written" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "student").exists()
    left = {p.name for p in (tmp_path / "run").rglob(".*")}
    assert left <= {".run.lock"}
    assert (tmp_path / "run" / "align" / "layer_001" / "mixer.safetensors").is_file()
    done = call(tmp_path, *small)
    assert done.returncode == 0
    assert "found, not redone" in done.stdout


@pytest.mark.parametrize(
    ("number", "option", "begun"),
    [
        (signal.SIGUSR1, "data.calibration_tokens=50000", "cache/calibrations/.*"),
        (signal.SIGINT, "align.steps=100000", "run/align/.layer_001.*"),
        (signal.SIGTERM, "eval.tokens=2000000", "cache/evaluations/.*"),
    ],
)
def test_a_signal_stops_with_a_status_and_leaves_nothing_half_written(
    number: signal.Signals, option: str, begun: str, tmp_path: Path
) -> None:
    options = [option, "run_dir=run", "experiment=smoke"]
    command = [sys.executable, str(ROOT / "run.py"), *options, f"paths.cache_dir={tmp_path}/cache"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        # Whoever started the tests in the background of a shell made them ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob(begun)) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)  # into the first steps
    process.send_signal(number)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130
    assert f"stopped by {number.name}; the same command continues" in said.decode()
    assert b"Traceback" not in said
    assert f"stopped by {number.name}" in (tmp_path / "run" / "run.log").read_text()
    assert not [path for path in tmp_path.rglob(".*") if path.suffix != ".lock"]
    assert (tmp_path / "run" / "data" / "tokens.safetensors").is_file()


def test_the_runs_of_a_sweep_are_a_group_of_its_own() -> None:
    group_of = runpy.run_path(str(ROOT / "run.py"), run_name="run")["group_of"]
    words = ["-m", "init=phase1,full", "+seed=0,1", "teacher=tiny_llama"]
    group = group_of(words)
    assert re.fullmatch(r"init-seed-[0-9a-f]{8}", group)
    assert group_of(words[::-1]).endswith(group[-8:])  # in another order they are the same sweep
    assert group_of([*words[:-1], "teacher=tiny_qwen2"])[-8:] != group[-8:]
