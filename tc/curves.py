"""Where curves go: Lightning's loggers, by `logger=`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from tc.config import LoggerConfig, LoggerKind
from tc.errors import TCError


class Curves:
    """The loggers of a run, as one: CSV always, and the one that was asked for.

    Args:
        loggers: each of them.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        self.loggers = loggers

    def log_metrics(self, values: dict[str, float], step: int | None = None) -> None:
        """Writes a point of some curves."""
        for logger in self.loggers:
            logger.log_metrics(values, step)

    def save(self) -> None:
        """Writes out what is held back."""
        for logger in self.loggers:
            logger.save()

    def finalize(self, status: str) -> None:
        """Says that nothing more will come."""
        for logger in self.loggers:
            logger.finalize(status)


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
    return Curves(loggers)


def log_table(curves: Curves, title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Writes a table, where a logger can show one."""
    for logger in curves.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table(title, columns, [[str(cell) for cell in row] for row in rows])


def _group(cfg: LoggerConfig) -> str | None:
    """The group that is set, or in a sweep the folder that its runs share."""
    if cfg.group is None and HydraConfig.initialized():
        hydra = HydraConfig.get()
        if hydra.mode is RunMode.MULTIRUN:
            return Path(hydra.sweep.dir).name
    return cfg.group


def _open(cfg: LoggerConfig, run_dir: Path) -> Logger:
    if cfg.kind is LoggerKind.tensorboard:
        return TensorBoardLogger(run_dir, name="curves", version="")
    logger = WandbLogger(
        project=cfg.project,
        group=_group(cfg),
        name=run_dir.name,
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
