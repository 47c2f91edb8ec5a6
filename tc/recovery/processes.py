"""Which of a run's processes this one is, before any of them has met."""

from __future__ import annotations

import os

from tc.config import Strategy, TrainerConfig


def global_rank(cfg: TrainerConfig) -> int:
    """This process' number: as torchrun, Slurm, or Lightning's own launcher says it."""
    if cfg.strategy is Strategy.single:
        return 0
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    if int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        return int(os.environ["SLURM_PROCID"])
    node = int(os.environ.get("NODE_RANK", 0))
    return node * cfg.devices + int(os.environ.get("LOCAL_RANK", 0))


def local_rank(cfg: TrainerConfig) -> int:
    """This process' number on its own machine."""
    if cfg.strategy is Strategy.single:
        return 0
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
