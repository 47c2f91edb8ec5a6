"""Streaming statistics of a teacher: attention, inputs and contexts of every layer."""

from tc.stats.attention import AttentionStatistics
from tc.stats.calibrate import PARTS, Calibration, LayerBatch, calibrate

__all__ = ["PARTS", "AttentionStatistics", "Calibration", "LayerBatch", "calibrate"]
