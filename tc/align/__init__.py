"""Layer-local alignment of mixers to their teacher layers."""

from tc.align.run import Aligned, align_layer

__all__ = ["Aligned", "align_layer"]
