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


def make_logger(cfg: LoggerConfig, run_dir: Path, settings: dict[str, Any]) -> Logger:
    """Opens a logger below the run folder and gives it the run's settings.

    Args:
        cfg: which one.
        run_dir: curves go to `curves/` there.
        settings: flat configuration, as hyper-parameters.

    Raises:
        TCError: if W&B cannot be reached.
    """
    with warnings.catch_warnings():
        # A resumed run writes its curves anew, from what its stages recorded.
        warnings.filterwarnings("ignore", message=".*logs directory.*not empty.*")
        logger = _open(cfg, run_dir)
        logger.log_hyperparams(settings)
    return logger


def log_table(logger: Logger, title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Writes a table, where the logger can show one."""
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
    if cfg.kind is LoggerKind.csv:
        return CSVLogger(run_dir, name="curves", version="")
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
