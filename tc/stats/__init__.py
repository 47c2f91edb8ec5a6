"""Streaming statistics of a teacher: attention, inputs and contexts of every layer."""

from tc.stats.attention import AttentionStatistics
from tc.stats.calibrate import Calibration, LayerBatch, calibrate

__all__ = ["AttentionStatistics", "Calibration", "LayerBatch", "calibrate"]
