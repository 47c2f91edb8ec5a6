"""The curve of a recovery as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tc.report.drawing import drawing


def draw_recovery(
    histories: dict[str, list[dict[str, Any]]], metrics: dict[str, Any], path: Path
) -> None:
    """Draws validation perplexity and training loss against tokens, the stages behind each other.

    Args:
        histories: points of each stage, in order.
        metrics: of the run; where it has the teacher's perplexity, ratios say what 1 is.
        path: a PNG file; replaced.
    """
    with drawing([path], (7, 6), 2, sharex=True) as (above, below):
        before = 0
        for name, history in histories.items():
            looks = [point for point in history if "perplexity" in point]
            tokens = [before + point["tokens"] for point in looks]
            ratios = [point["perplexity_over_teacher"] for point in looks]
            above.plot(tokens, ratios, "o-", label=name)
            steps = [point for point in history if "loss" in point]
            losses = [point["loss"] for point in steps]
            below.plot([before + point["tokens"] for point in steps], losses, label=name)
            before += history[-1]["tokens"]
        above.axhline(1, color="grey", linewidth=1)
        above.set_ylabel("validation perplexity / teacher's")
        above.set_yscale("log")
        below.set_ylabel("training loss")
        below.set_yscale("log")
        below.set_xlabel("training tokens")
        above.legend()
