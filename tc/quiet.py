"""Lightning without its greetings, and without a hand in signals."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Lightning greets and advises at every fit, of which a run has dozens."""
    loggers = [logging.getLogger(f"lightning.pytorch{s}") for s in ("", ".utilities.rank_zero")]
    loggers.append(logging.getLogger("lightning.fabric"))
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec.*")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def fit(trainer: L.Trainer, *what: Any) -> None:
    """Trains; signals stay with whoever listens to them.

    Lightning's own handlers would take their place, end other processes at once, and requeue a
    Slurm job that this package saves by itself; and it makes an exit of what stops it.

    Args:
        trainer: fresh.
        what: the module, and its data where it has none of its own.

    Raises:
        KeyboardInterrupt: as it was raised by a signal's handler.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    try:
        trainer.fit(*what)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise
