"""Lightning without its greetings."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


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
