"""Where curves go: Lightning's loggers, by `logger=`."""

from __future__ import annotations

import os
import secrets
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from tc.artifacts import hash_of, read_json, write_json, write_text
from tc.config import SWEEP, LoggerConfig, LoggerKind
from tc.errors import TCError


class Curves:
    """The loggers of a run, as one: CSV always, and the one that was asked for.

    A run that goes on tells its curves from their beginning again. Files are written anew, but a
    W&B run goes on where it was, and must not get a point twice.

    Args:
        loggers: each of them.
        record: the file that keeps which points W&B has.
    """

    def __init__(self, loggers: list[Logger], record: Path) -> None:
        self.loggers, self._record = loggers, record
        goes_on = any(isinstance(x, WandbLogger) and x.experiment.resumed for x in loggers)
        self._told: set[str] = set(read_json(record)) if goes_on and record.is_file() else set()

    def log_metrics(self, values: dict[str, float], step: int | None = None) -> None:
        """Writes a point of some curves."""
        point = _name_of(values, step)
        for logger in self.loggers:
            if not (isinstance(logger, WandbLogger) and point in self._told):
                logger.log_metrics(values, step)
        if step is not None:
            self._told.add(point)

    def save(self) -> None:
        """Writes out what is held back."""
        for logger in self.loggers:
            logger.save()
            if isinstance(logger, WandbLogger):
                write_json(self._record, sorted(self._told))

    def finalize(self, status: str) -> None:
        """Says that nothing more will come; the next run of a sweep opens loggers of its own.

        Args:
            status: `success`, or why not.
        """
        self.save()
        for logger in self.loggers:
            logger.finalize(status)
            if isinstance(logger, WandbLogger):
                # Lightning leaves it open, and would have the next run of this process go into it.
                logger.experiment.finish(exit_code=int(status != "success"))


def _name_of(values: dict[str, float], step: int | None) -> str:
    """What tells a point from all others: its step, its curves, and the layer they are of."""
    layers = ("/layer", "/first_layer")
    return f"{step}:" + hash_of({k: v if k.endswith(layers) else None for k, v in values.items()})


def make_logger(cfg: LoggerConfig, run_dir: Path, settings: dict[str, Any]) -> Curves:
    """Opens the loggers below the run folder and gives them the run's settings.

    Args:
        cfg: which one, besides CSV.
        run_dir: curves go to `curves/` there.
        settings: flat configuration, as hyper-parameters.

    Raises:
        TCError: if W&B cannot be reached.
    """
    with warnings.catch_warnings():
        # A resumed run writes its curves anew, from what its stages recorded.
        warnings.filterwarnings("ignore", message=".*logs directory.*not empty.*")
        loggers: list[Logger] = [CSVLogger(run_dir, name="curves", version="")]
        loggers += [] if cfg.kind is LoggerKind.csv else [_open(cfg, run_dir)]
        for logger in loggers:
            logger.log_hyperparams(settings)
    return Curves(loggers, run_dir / "curves" / "wandb_points.json")


def log_table(curves: Curves, title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Writes a table, where a logger can show one."""
    for logger in curves.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table(title, columns, [[str(cell) for cell in row] for row in rows])


def _wandb_id(run_dir: Path) -> str:
    """The W&B run of a run folder, which a run that goes on there continues."""
    path = run_dir / "curves" / "wandb_id"
    if not path.is_file():
        write_text(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8")


def _open(cfg: LoggerConfig, run_dir: Path) -> Logger:
    if cfg.kind is LoggerKind.tensorboard:
        return TensorBoardLogger(run_dir, name="curves", version="")
    logger = WandbLogger(
        project=cfg.project,
        group=cfg.group or os.environ.get(SWEEP),
        name=run_dir.name,
        id=_wandb_id(run_dir),
        save_dir=run_dir,
        offline=cfg.offline,
    )
    try:
        _ = logger.experiment
    except Exception as error:  # wandb raises its own types, which are not imported here
        raise TCError(
            f"logger=wandb could not start ({error}). Log in with `wandb login`, or take "
            "logger.offline=true and `wandb sync` later."
        ) from error
    return logger
