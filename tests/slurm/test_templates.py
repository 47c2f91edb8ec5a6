"""The sbatch templates: whole as scripts, and run for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from composing import ROOT

TEMPLATES = sorted((ROOT / "slurm").iterdir())

SMALL = ["experiment=smoke", "trainer.accelerator=cpu", "recovery=none", "eval.tokens=128"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_is_whole_and_the_readme_names_it(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    if path.suffix == ".sbatch":
        assert f"slurm/{path.name}" in (ROOT / "README.md").read_text()
        assert "again_if_stopped" in path.read_text()


def test_a_broken_template_would_be_seen(tmp_path: Path) -> None:
    broken = tmp_path / "broken.sbatch"
    broken.write_text(TEMPLATES[0].read_text() + "\nif true; then\n")
    assert subprocess.run(["bash", "-n", broken], check=False, capture_output=True).returncode != 0


def submit(folder: Path, template: str, *args: str, options: tuple[str, ...] = ()) -> str:
    """Submits a template as a person does, small enough for the tests' node; its number."""
    places = [f"paths.cache_dir={folder}/cache", f"run_dir={folder}/run"]
    small = ["--cpus-per-task=1", "--mem=0", f"--output={folder}/%a.log"]
    command = [
        "sbatch",
        "--parsable",
        *small,
        *options,
        f"slurm/{template}",
        *SMALL,
        *places,
        *args,
    ]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "WAIT_S": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def wait_for(job: str, seconds: float = 280) -> None:
    end = time.monotonic() + seconds
    while subprocess.run(["squeue", "-h", "-j", job], capture_output=True, check=False).stdout:
        assert time.monotonic() < end, "not in time"
        time.sleep(0.2)


@pytest.mark.slurm
@pytest.mark.usefixtures("cluster")
def test_one_run_on_one_gpu(tmp_path: Path) -> None:
    wait_for(submit(tmp_path, "one_gpu.sbatch"))
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert (tmp_path / "run" / "metrics.json").is_file(), logs


@pytest.mark.slurm
@pytest.mark.usefixtures("cluster")
def test_layers_are_searched_for_by_an_array(tmp_path: Path) -> None:
    job = submit(
        tmp_path,
        "selection.sbatch",
        *("policy=greedy", "policy.count=1", "policy.tokens=128"),
        options=("--array=0-1", "--gpus-per-node=1"),
    )
    wait_for(job)
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert "worker 1: helps to score" in logs
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["select/kept"] != "", logs
