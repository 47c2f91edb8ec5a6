"""The run folder, which is a contract: configuration, environment, metrics, artifacts, log."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import logging
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import DictConfig, OmegaConf

from tc.artifacts import (
    MANIFEST,
    ROOMS,
    code_version,
    differences,
    disk_errors,
    read_manifest,
    read_object,
    write_json,
    write_text,
)
from tc.config import science
from tc.errors import TCError, one_message
from tc.evaluate import Results, read_results, write_results
from tc.locks import locked

STAGE_FOLDERS = ("data", "init", "align", "select", "blocks", "recover", "student", "evaluate")
SIGN = "at_work"
"""A file whose time of change moves while the first of several processes of a run is at work."""

RECORDS = (
    *("metrics.json", "metrics.csv", "results.csv"),
    *("artifacts.json", "environment.json", "code.diff"),
    SIGN,
)
FAILED = "failed.json"
"""Says of a run that has ended early in what stage and why; absent where a run begins anew."""

PACKAGES = (
    "torch",
    "transformers",
    "lightning",
    "hydra-core",
    "omegaconf",
    "datasets",
    "safetensors",
    "gguf",
    "flash-linear-attention",
    "triton",
)


BEAT_S = 1.0
PATIENCE_S = 600.0


class Pulse:
    """The first process of a run, as the others hear of it through the run folder.

    What an earlier run has left there is no sign of this one: only a change that is seen is.

    Args:
        path: the run folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last, self._heard = self._changed(), time.monotonic()

    def wait(self) -> None:
        """Returns once the first process is seen at work, which is after it has cleared the folder.

        Raises:
            TCError: if it is not for ten minutes.
        """
        while not self.listen():
            time.sleep(BEAT_S / 4)

    def listen(self) -> bool:
        """Whether there has been a sign since the last call.

        Raises:
            TCError: if there has been none for ten minutes.
        """
        now = self._changed()
        if now is not None and now != self._last:
            self._last, self._heard = now, time.monotonic()
            return True
        if time.monotonic() - self._heard > PATIENCE_S:
            raise TCError(
                f"nothing has been heard of the run's first process in {self._path} for "
                f"{PATIENCE_S / 60:.0f} minutes. It has ended (its own message says why), or has "
                "another run_dir: give all processes the same settings, and a file system that "
                "they share."
            )
        return False

    def _changed(self) -> int | None:
        try:
            return (self._path / SIGN).stat().st_mtime_ns
        except OSError:
            return None


LOCK = "run"
"""The lock of a run folder lies in it (`.run.lock`), so that all who share the one share both."""


@contextmanager
def alone(path: Path, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Keeps every other run out of a run folder until this one ends, however it ends.

    Args:
        path: the folder; made where there is none.
        say: told where the file system has no locks.

    Raises:
        TCError: if another process runs there, saying which; if the folder is not a run's.
    """
    with ExitStack() as stack:
        with disk_errors(path):
            refuse_others_folder(path)
            path.mkdir(parents=True, exist_ok=True)
            what = f"the run folder {path}"
            stack.enter_context(locked(path / LOCK, what, wait=False, say=say))
        yield


def refuse_others_folder(path: Path) -> None:
    """Refuses a folder that holds something, and no run.

    Raises:
        TCError: saying so.
    """
    if (path / "science.json").is_file() or not (path.exists() or path.is_symlink()):
        return
    # Of a run, too, is what one leaves that was killed before it had put its first record in place.
    ours = (FAILED, f".{LOCK}.", ".science.json.")
    if not path.is_dir() or not all(p.name.startswith(ours) for p in path.iterdir()):
        raise TCError(f"run_dir={path} exists and is not the folder of a run; take another one.")


class RunFolder:
    """Opens a folder for a run, or refuses it.

    Args:
        path: the folder; made where there is none.
        cfg: the composed configuration.
        resume: false removes what the stages of an earlier run left there.

    Attributes:
        path: the folder.
        stage: the one that runs, for whoever tells of a failure.

    Raises:
        TCError: if it holds a run of another configuration, saying what differs, or something else.
    """

    def __init__(self, path: Path, cfg: DictConfig, resume: bool) -> None:
        self.path = path
        self.stage = ""
        facts = science(cfg)
        with disk_errors(path):
            self._check(facts, resume)
            path.mkdir(parents=True, exist_ok=True)
            forget_failure(path)
            for unfinished in self.path.rglob(".*.*"):  # of a run that was killed while it wrote
                shutil.rmtree(unfinished, ignore_errors=True)
            if not resume:
                self._clear()
            write_json(path / "science.json", facts)
            resolved = OmegaConf.to_yaml(cfg, resolve=True)
            write_text(path / "config.yaml", resolved)
            # Of the run that began here: one that only finds results must not claim them.
            if not (path / "environment.json").is_file():
                write_json(path / "environment.json", environment())
                write_text(path / "code.diff", git("diff", "HEAD") or "")

    @classmethod
    def of_another(cls, path: Path) -> RunFolder:
        """The folder of a run that another process has opened; nothing is written to it."""
        folder = cls.__new__(cls)
        folder.path, folder.stage = path, ""
        return folder

    @classmethod
    def to_help(cls, path: Path, cfg: DictConfig) -> RunFolder:
        """The folder of a run that this process helps to score layers, of the same settings.

        Raises:
            TCError: if it is of others, which are named.
        """
        record = path / "science.json"
        changed = differences(read_object(record), science(cfg)) if record.is_file() else []
        if changed:
            raise one_message(
                changed,
                f"policy.worker={cfg.policy.worker} has other settings than the run that it is to "
                f"help in {path} (worker 0 -> here). Give all workers the same:",
            )
        return cls.of_another(path)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Tells the other processes of this run, as long as it lasts, that this one is at work."""
        ended, sign = threading.Event(), self.path / SIGN

        def beat() -> None:
            while not ended.wait(BEAT_S):
                with suppress(OSError):  # a full disk is found, and told, by what writes results
                    sign.touch()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            sign.unlink(missing_ok=True)

    def _check(self, facts: dict[str, Any], resume: bool) -> None:
        record = self.path / "science.json"
        if record.is_file():
            changed = differences(read_object(record), facts)
            if changed and resume:
                raise one_message(
                    changed,
                    f"{self.path} holds a run of another configuration (there -> here). Take "
                    "another run_dir, or resume=false to begin anew there:",
                )
        else:
            refuse_others_folder(self.path)

    def _clear(self) -> None:
        for name in (*STAGE_FOLDERS, "curves", *RECORDS):
            target = self.path / name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    def log_to_file(self) -> logging.Handler:
        """Sends this package's log to `run.log` as well; close the handler when done."""
        handler = logging.FileHandler(self.path / "run.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("tc")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        return handler

    def read_metrics(self) -> dict[str, Any]:
        """The metrics that an earlier run of the same configuration left here, or none."""
        path = self.path / "metrics.json"
        return read_object(path) if path.is_file() else {}

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """Writes the flat metrics as `metrics.json` and `metrics.csv`."""
        write_json(self.path / "metrics.json", metrics)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([("metric", "value"), *metrics.items()])
        write_text(self.path / "metrics.csv", text.getvalue())

    def read_results(self) -> Results:
        """What an earlier run has measured here, or nothing."""
        path = self.path / "results.csv"
        return read_results(path) if path.is_file() else {}

    def write_results(self, results: Results) -> None:
        """Writes all that was measured as `results.csv`, a row a number."""
        write_results(self.path / "results.csv", results)

    def write_artifacts(self, others: dict[str, Path]) -> None:
        """Writes `artifacts.json`: key and file hashes of every artifact of the run.

        Args:
            others: artifacts outside the run folder, such as a shared calibration.
        """
        inside = {str(p.parent.relative_to(self.path)): p.parent for p in self._manifests()}
        table = {}
        for name, folder in {**inside, **others}.items():
            manifest = read_manifest(folder)
            if manifest is not None:
                facts = {"kind": manifest.kind, "key": manifest.key, "files": manifest.files}
                table[name] = {"folder": str(folder), **facts}
        write_json(self.path / "artifacts.json", table)

    def _manifests(self) -> list[Path]:
        return sorted(p for name in STAGE_FOLDERS for p in (self.path / name).rglob(MANIFEST))


def describe(error: BaseException, stage: str = "") -> dict[str, str]:
    """What `failed.json` says of an error: where, of what kind, why, when."""
    message = str(error)
    if isinstance(error, KeyboardInterrupt):
        message = message or "stopped by a signal; the same command continues where it was"
    return {
        "stage": stage,
        "kind": type(error).__name__,
        "message": message or type(error).__name__,
        "time": datetime.now().astimezone().isoformat("T", "seconds"),
    }


def write_failure(path: Path, failure: dict[str, str]) -> None:
    """Leaves word in a run folder, which need not exist, that its run has failed.

    Where even that cannot be written, as on a full disk, the error itself matters more.
    """
    with suppress(OSError, TCError):
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / FAILED, failure)


def forget_failure(path: Path) -> None:
    """Removes the word of a failure: the run has begun anew, or is whole."""
    (path / FAILED).unlink(missing_ok=True)


def read_failure(path: Path) -> dict[str, str] | None:
    """What a failed run has left word of, or None."""
    try:
        found = read_object(path / FAILED)
        return {key: str(found[key]) for key in ("stage", "kind", "message", "time")}
    except (OSError, TCError, KeyError, TypeError):
        return None


def environment() -> dict[str, Any]:
    """What a result may depend on besides configuration and code: versions and hardware."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "code": code_version(ROOMS[-1]),
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain")),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def git(*args: str) -> str | None:
    """What git says of this package's own checkout, or None where it is not one."""
    command = ["git", "-C", str(Path(__file__).parent), *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.rstrip("\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
