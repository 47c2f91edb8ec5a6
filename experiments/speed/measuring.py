"""What the measurements of this folder share. Linux only: it reads `/proc`."""

from __future__ import annotations

import argparse
import copy
import ctypes
import datetime
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from transformers.utils.logging import disable_progress_bar

from tc.artifacts import write_json
from tc.config import Config, PolicyConfig, register, typed
from tc.init import form_of, fresh_mixer
from tc.policy import converted_layers
from tc.run_folder import environment, git
from tc.student.mixer import GatedDeltaNet
from tc.teacher import Teacher, load_teacher

CONF = Path(__file__).resolve().parents[2] / "conf"
FACTS = (
    "git_commit",
    "cpu",
    "cores",
    "memory_bytes",
    "gpus",
    "torch_threads",
    "python",
    "packages",
)

Call = Callable[[], Any]

disable_progress_bar()
warnings.filterwarnings("ignore", "Triton is not supported")  # FLA, where there is no GPU


def extra_bytes(call: Call) -> int:
    """How far resident memory rises while a call runs: VmHWM, set back to VmRSS beforehand.

    What earlier calls have freed goes back to the system first, or it would be used unseen.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    call()
    return _peak_bytes() - before


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def extra_bytes_alone(*arguments: object) -> int:
    """Runs this script once more, `--alone` with these arguments; it prints its `extra_bytes`.

    There the C library maps every block of a MiB or more by itself and unmaps it when freed. By
    default it learns from what is freed which blocks to keep, and the peak follows from that too.
    """
    command = [sys.executable, sys.argv[0], "--alone", *map(str, arguments)]
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environ)
    return int(done.stdout.splitlines()[-1])


def parse_arguments(description: str | None, lengths: Sequence[int]) -> argparse.Namespace:
    """The command line that all measurements share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--lengths", nargs="+", type=int, default=lengths, help="tokens")
    parser.add_argument("--output", type=Path, help="JSON file to write; none by default")
    parser.add_argument("--alone", nargs="+", help="one case in this process; used by the script")
    return parser.parse_args()


def show(row: dict[str, Any]) -> dict[str, Any]:
    """Prints a row as soon as it is there."""
    facts = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
    print(" ".join(facts), flush=True)
    return row


def write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Writes rows with the day, the code and the machine that they were measured on."""
    if path is not None:
        facts = environment()
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "date": datetime.date.today().isoformat(),
            "environment": {key: facts[key] for key in FACTS},
            # Of the package, which is what was measured: results here are written as they come.
            "uncommitted_changes": bool(git("status", "--porcelain", ".")),
            "rows": rows,
        }
        write_json(path, result)


def load_embedded(*overrides: str) -> tuple[Config, Teacher]:
    """The default run's configuration, with overrides, and its teacher."""
    config = configuration(*overrides)
    return config, load_teacher(config.teacher, Path(config.paths.cache_dir).expanduser())


def copied_mixers(
    config: Config, teacher: Teacher, policy: PolicyConfig
) -> dict[int, GatedDeltaNet]:
    """Mixers that copy the projections of the layers that a policy converts.

    What a mixer holds does not change how long it takes.
    """
    attention = [layer.self_attn for layer in teacher.model.model.layers]
    form = form_of(attention[0], config.student, config.trainer.backend.value)
    layers = converted_layers(policy, len(attention))
    return {i: fresh_mixer(copy.deepcopy(attention[i]), i, form, config.seed) for i in layers}


def configuration(*overrides: str) -> Config:
    """A configuration as `run.py` composes it."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return typed(compose("config", overrides=list(overrides)))
