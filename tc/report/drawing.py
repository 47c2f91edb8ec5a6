"""Pictures by matplotlib, which is loaded only where one is drawn, and written whole or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tc.artifacts import disk_errors, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@contextmanager
def drawing(
    paths: list[Path], size: tuple[float, float], rows: int = 1, **subplots: Any
) -> Iterator[list[Axes]]:
    """Yields axes to draw on, then saves them.

    Args:
        paths: of the files, each `.png` or `.svg`; replaced.
        size: width and height in inches.
        rows: axes below each other.
        subplots: what matplotlib's `subplots` takes besides.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # A text stays text, and the same picture is the same file.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tc"}):
        figure, axes = plt.subplots(
            rows, 1, figsize=size, layout="constrained", squeeze=False, **subplots
        )
        try:
            yield list(axes[:, 0])
            for path in paths:
                kind = path.suffix[1:]
                undated = {"Date": None} if kind == "svg" else {}
                with disk_errors(path), replacing(path) as fresh:
                    figure.savefig(fresh, format=kind, dpi=120, metadata=undated)
        finally:
            plt.close(figure)
