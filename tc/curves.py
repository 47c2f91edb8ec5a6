"""Where curves go: Lightning's loggers, by `logger=`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

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


def _open(cfg: LoggerConfig, run_dir: Path) -> Logger:
    if cfg.kind is LoggerKind.csv:
        return CSVLogger(run_dir, name="curves", version="")
    if cfg.kind is LoggerKind.tensorboard:
        return TensorBoardLogger(run_dir, name="curves", version="")
    logger = WandbLogger(
        project=cfg.project,
        group=cfg.group,
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
