"""Alignment of mixers to their teacher: layer by layer, then block by block."""

from tc.align.run import Aligned, align_block, align_layer
from tc.align.walk import Walk, blocks_of

__all__ = ["Aligned", "Walk", "align_block", "align_layer", "blocks_of"]
