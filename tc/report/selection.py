"""The scores of a search for layers, as a table, a CSV file and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tc.artifacts import write_text
from tc.config import PolicyKind
from tc.report.drawing import drawing
from tc.select import Round

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = ["round", "layer", "loss", "score", "kept"]
WHAT = {
    PolicyKind.ar: "rise in the teacher's NLL without the layer's attention",
    PolicyKind.ga_s2: "drop in KL(teacher || student) where the layer alone is kept",
    PolicyKind.greedy: "drop in KL(teacher || student) by the layer",
}


def selection_rows(rounds: Sequence[Round], kept: Sequence[int]) -> list[list[Any]]:
    """A row a score, of `COLUMNS`: round from 1, layer, loss and score in nats, if it was taken."""
    return [
        [number, layer, f"{loss:.6f}", f"{found.scores[layer]:.6f}", layer in taken]
        for number, (found, taken) in enumerate(zip(rounds, _taken(rounds, kept), strict=True), 1)
        for layer, loss in found.losses.items()
    ]


def write_selection(
    folder: Path, kind: PolicyKind, rounds: Sequence[Round], kept: Sequence[int]
) -> None:
    """Writes `scores.csv`, `table.md` and `scores.png`.

    Args:
        folder: where.
        kind: of the search.
        rounds: of the search, in order.
        kept: the layers that were chosen.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([COLUMNS, *selection_rows(rounds, kept)])
    write_text(folder / "scores.csv", text.getvalue())
    write_text(folder / "table.md", _table(kind, rounds, kept))
    _draw(folder / "scores.png", kind, rounds, kept)


def _taken(rounds: Sequence[Round], kept: Sequence[int]) -> list[set[int]]:
    """What each round has brought."""
    if len(rounds) == 1:
        return [set(kept)]
    bases = [*(set(found.base) for found in rounds), set(kept)]
    return [after - before for before, after in pairwise(bases)]


def _table(kind: PolicyKind, rounds: Sequence[Round], kept: Sequence[int]) -> str:
    """A line a layer, best first, or of a path a line a round."""
    lines = [
        f"Kept: {', '.join(map(str, kept))}. Score: {WHAT[kind]}, in nats a token, on selection "
        f"tokens; {rounds[0].start:.4f} to begin with.",
        "",
    ]
    if kind is PolicyKind.greedy:
        lines += ["| layers kept | added | KL | score | next best |", "|---|---|---|---|---|"]
        for number, found in enumerate(rounds, 1):
            first, *rest = found.best(2)
            second = f"{rest[0]} ({found.scores[rest[0]]:.4f})" if rest else ""
            loss, score = found.losses[first], found.scores[first]
            lines.append(f"| {number} | {first} | {loss:.4f} | {score:.4f} | {second} |")
    else:
        lines += ["| layer | loss | score | kept |", "|---|---|---|---|"]
        (only,) = rounds
        for i in only.best(len(only.losses)):
            mark = "yes" if i in kept else ""
            lines.append(f"| {i} | {only.losses[i]:.4f} | {only.scores[i]:.4f} | {mark} |")
    return "\n".join([*lines, ""])


def _draw(path: Path, kind: PolicyKind, rounds: Sequence[Round], kept: Sequence[int]) -> None:
    if kind is PolicyKind.greedy:
        with drawing([path], (7, 7), 2) as (above, below):
            _draw_path(above, rounds)
            _draw_rounds(below, rounds)
        return
    with drawing([path], (7, 3.5)) as (axes,):
        scores = rounds[0].scores
        colors = ["C1" if i in kept else "C0" for i in scores]
        axes.bar(list(scores), list(scores.values()), color=colors)
        axes.set_xlabel("layer (orange: keeps attention)")
        axes.set_ylabel("score, nats a token")
        axes.set_title(WHAT[kind], fontsize="medium")


def _draw_path(axes: Axes, rounds: Sequence[Round]) -> None:
    """The KL divergence against the number of kept layers, with the layer that each step adds."""
    from matplotlib.ticker import MaxNLocator

    losses = [rounds[0].start, *(min(found.losses.values()) for found in rounds)]
    axes.plot(range(len(losses)), losses, "o-")
    for number, found in enumerate(rounds, 1):
        place = (number, losses[number])
        axes.annotate(str(found.best(1)[0]), place, (4, 4), textcoords="offset points")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layers that keep attention")
    axes.set_ylabel("KL(teacher || student)")


def _draw_rounds(axes: Axes, rounds: Sequence[Round]) -> None:
    """The scores of every round, the layers that are kept already left white."""
    from matplotlib.ticker import MaxNLocator

    layers = len(rounds[0].losses)
    # As shares of the round's best: later rounds have ever less to gain.
    grid = [
        [
            found.scores[i] / abs(found.scores[found.best(1)[0]] or 1) if i in found.losses else nan
            for i in range(layers)
        ]
        for found in rounds
    ]
    edges = (-0.5, layers - 0.5, len(rounds) + 0.5, 0.5)
    image = axes.imshow(grid, aspect="auto", vmin=0, vmax=1, extent=edges)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.colorbar(image, ax=axes, label="score / the round's best")
    axes.set_xlabel("layer")
    axes.set_ylabel("round")
