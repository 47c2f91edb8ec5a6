"""Distillation of the whole student: stage 1 layer by layer, stage 2 end to end."""

from tc.recovery.checkpoint import read_weights
from tc.recovery.health import watching
from tc.recovery.losses import ROWS as KL_ROWS
from tc.recovery.processes import global_rank, local_rank
from tc.recovery.run import Stage, Stopped, Watch, load_weights, run_stage, student_of

__all__ = [
    "KL_ROWS",
    "Stage",
    "Stopped",
    "Watch",
    "global_rank",
    "load_weights",
    "local_rank",
    "read_weights",
    "run_stage",
    "student_of",
    "watching",
]
