"""The command of one job, and what its end means."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

OF_THE_SWEEP = ("hydra/launcher", "hydra/sweeper", "hydra.launcher", "hydra.sweep", "hydra.mode")
"""How overrides begin that no job needs: they are the sweep's."""

LAST_WORDS = 2000
"""So many bytes of a log are looked at."""


def command_of(sweep: DictConfig, overrides: Sequence[str]) -> list[str]:
    """What runs one job of a sweep as an ordinary run, from the same folder.

    Args:
        sweep: the configuration of the sweep as a whole.
        overrides: of the job.
    """
    script = Path(sys.argv[0]).resolve()
    own = [str(word) for word in sweep.hydra.overrides.hydra]
    own = [word for word in own if not word.lstrip("+~").startswith(OF_THE_SWEEP)]
    return [sys.executable, str(script), *_places(sweep, script), *own, *overrides]


def _places(sweep: DictConfig, script: Path) -> list[str]:
    """Where the configuration is read from, if that is not the usual place."""
    places = []
    if sweep.hydra.job.config_name != "config":
        places += ["--config-name", str(sweep.hydra.job.config_name)]
    for source in sweep.hydra.runtime.config_sources:
        if source.provider == "command-line":
            places += ["--config-dir", str(source.path)]
        elif source.provider == "main" and Path(source.path) != script.parent / "conf":
            places += ["--config-path", str(source.path)]
    return places


def problem_of(status: int, log: Path) -> str | None:
    """What a job's exit status and its errors say of its end; None where it is done."""
    if status == 0:
        return None
    said = last_words(log)
    if status > 0:
        return said or f"it ended with status {status} and said nothing"
    killed = f"killed by {signal.Signals(-status).name}"
    if -status == signal.SIGKILL:
        killed += " (as the system does where memory runs out, or a person)"
    return f"{killed}; its last words: {said or 'none'}"


def last_words(log: Path) -> str:
    """The error that a log ends with, or else its last line."""
    try:
        data = log.read_bytes()[-LAST_WORDS:]
    except OSError:
        return ""
    text = "\n" + data.decode(errors="replace").strip()
    _, mark, error = text.rpartition("\nerror: ")
    if mark:
        return error.split("\nError executing job", 1)[0].strip()  # Hydra repeats the overrides
    return text.rpartition("\n")[2].strip()
