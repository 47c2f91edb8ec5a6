"""Searches for the layers that are to keep attention, by scores on selection tokens."""

from tc.select.losses import BypassLoss, HybridLoss, Loss, Variant
from tc.select.search import Round, bypass_scores, ga_s2_scores, greedy_path, num_scores, search
from tc.select.shared import SharedLosses

__all__ = [
    "BypassLoss",
    "HybridLoss",
    "Loss",
    "Round",
    "SharedLosses",
    "Variant",
    "bypass_scores",
    "ga_s2_scores",
    "greedy_path",
    "num_scores",
    "search",
]
