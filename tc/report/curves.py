"""The curves of many runs: which there are, thinned, and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tc.report.drawing import drawing
from tc.report.frame import Group


@dataclass(frozen=True)
class Kind:
    """What a chart shows.

    Attributes:
        title: its heading.
        x, y: what the axes count.
        log_x, log_y: whether they are logarithmic; 0 stands at the left edge of such an x.
        reference: a value of y that a line marks, or None.
    """

    title: str
    x: str
    y: str
    log_x: bool = False
    log_y: bool = True
    reference: float | None = None


TOKENS, STEPS = "training tokens", "steps"
KINDS = {
    "perplexity_over_teacher": Kind(
        "Validation perplexity over the teacher's", TOKENS, "x teacher", True, True, 1.0
    ),
    "perplexity": Kind("Validation perplexity", TOKENS, "perplexity", True),
    "loss": Kind("Training loss", TOKENS, "loss", True),
    "align": Kind("Alignment: mean error of the layers", STEPS, "relative error"),
    "blocks": Kind("Alignment of blocks: mean error", STEPS, "relative error"),
    "align_layers": Kind("Alignment, layer by layer", STEPS, "relative error"),
    "blocks_layers": Kind("Alignment, block by block", STEPS, "relative error"),
    "positions": Kind("Loss by position", "position in the context", "nats a token", True, False),
}
"""Every kind of curve, in the order of the page."""

OF_FEW = ("align_layers", "blocks_layers")
"""Kinds with a line for each layer, which only a few runs leave readable."""

FEW = 4

COLOURS = (
    *("#2f6db5", "#d1702a", "#2f8f5b", "#b8374a", "#7a5ab8"),
    *("#8a6a4a", "#c653a0", "#5d6b7a", "#8f8a1f", "#1f97a8"),
)
"""One a group, in turn; the same in pictures and on the page."""


@dataclass(frozen=True)
class Line:
    """A curve and whose it is.

    Attributes:
        kind: a key of `KINDS`.
        group: the number of its group.
        run: the name of its run.
        label: what tells it from others of its run, or empty.
        points: x and y.
    """

    kind: str
    group: int
    run: str
    label: str
    points: list[tuple[float, float]]


def lines(groups: Sequence[Group], most: int | None = None) -> list[Line]:
    """The curves of all runs of some groups.

    Args:
        groups: whose.
        most: points of a line, if it is to be thinned.
    """
    few = sum(len(group.runs) for group in groups) <= FEW
    return [
        Line(curve.kind, number, run.name, curve.label, thinned(curve.points, most))
        for number, group in enumerate(groups)
        for run in group.runs
        for curve in run.curves
        if few or curve.kind not in OF_FEW
    ]


def thinned(points: list[tuple[float, float]], most: int | None) -> list[tuple[float, float]]:
    """At most so many points of a curve, evenly picked, the first and the last among them."""
    if most is None or len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def draw_curves(groups: Sequence[Group], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Draws a picture of each kind of curve that the runs have.

    Args:
        groups: whose; each has a colour.
        folder: where; files are called `curve_<kind>`.
        formats: `png`, `svg`.

    Returns:
        The files.
    """
    written = []
    found = lines(groups)
    for name, kind in KINDS.items():
        if own := [line for line in found if line.kind == name]:
            paths = [folder / f"curve_{name}.{ending}" for ending in formats]
            _draw(kind, own, groups, paths)
            written += paths
    return written


def _draw(kind: Kind, own: list[Line], groups: Sequence[Group], paths: list[Path]) -> None:
    with drawing(paths, (7, 4.2)) as (axes,):
        left = _left(own) if kind.log_x else None
        named: set[int] = set()
        for line in own:
            xs = [max(x, left) if left else x for x, _ in line.points]
            ys = [y for _, y in line.points]
            label = None if line.group in named else groups[line.group].label
            named.add(line.group)
            colour = COLOURS[line.group % len(COLOURS)]
            (drawn,) = axes.plot(xs, ys, color=colour, linewidth=1.3, alpha=0.85)
            if label is not None:
                # Two dollars in a name would be taken for mathematics.
                drawn.set_label(label.replace("$", r"\$"))
        if kind.reference is not None:
            axes.axhline(kind.reference, color="grey", linewidth=1)
        if kind.log_x:
            axes.set_xscale("log")
        if kind.log_y and all(y > 0 for line in own for _, y in line.points):
            axes.set_yscale("log")
        at_edge = left and any(x < left for line in own for x, _ in line.points)
        axes.set_xlabel(f"{kind.x} (leftmost: none)" if at_edge else kind.x)
        axes.set_ylabel(kind.y)
        axes.set_title(kind.title, fontsize="medium", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        if 1 < len(named) <= 2 * len(COLOURS):
            axes.legend(fontsize="small", frameon=False)


def _left(own: list[Line]) -> float | None:
    """Where 0 stands on a logarithmic axis: half of the least that is above it."""
    above = [x for line in own for x, _ in line.points if x > 0]
    return min(above) / 2 if above else None
