"""What was measured besides perplexity, as tables: the student against the teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tc import ui
from tc.evaluate import Result

Table = tuple[str, list[str], list[list[Any]]]

Key = tuple[str, str, int | None, int | None]

RATIOS = ("perplexity", "per_second", "bytes")
"""Metrics that are compared by their ratio; the others by their difference."""

SHOWN = {"corpus": ("perplexity", "bits_per_byte")}
"""Where a measure has many metrics, those that a table shows; all of them are in results.csv."""


def result_tables(results: Mapping[str, list[Result]]) -> list[Table]:
    """Title, columns and rows of a table for each measure but perplexity."""
    measures = dict.fromkeys(r.measure for found in results.values() for r in found)
    return [_table(measure, results) for measure in measures if measure != "perplexity"]


def _table(measure: str, results: Mapping[str, list[Result]]) -> Table:
    values = {name: _values(measure, found) for name, found in results.items()}
    models = [name for name, found in values.items() if found]
    keys = _compact(measure, list(dict.fromkeys(key for name in models for key in values[name])))
    tasks = {key[0] for key in keys}
    title = f"{measure}, {tasks.pop()}" if len(tasks) == 1 else measure
    # A column that would be empty is left out.
    places = [name for i, name in ((2, "context"), (3, "position")) if any(k[i] for k in keys)]
    rows = []
    for key in keys:
        at = {"context": key[2], "position": key[3]}
        figures = [_figure(values[name].get(key)) for name in models]
        cells = ["" if at[place] is None else f"{at[place]:,}" for place in places]
        label = key[1] if title != measure else f"{key[0]} {key[1]}"
        rows.append([label, *cells, *figures, _against(values, key)])
    return title, ["", *places, *models, "against teacher"], rows


def _values(measure: str, found: list[Result]) -> dict[Key, Result]:
    return {(r.task, r.metric, r.context, r.position): r for r in found if r.measure == measure}


def _compact(measure: str, keys: list[Key]) -> list[Key]:
    """Without what repeats a figure, and without the parts of a group of tasks."""
    tasks = {key[0] for key in keys}
    normed = {key[0] for key in keys if key[1] == "acc_norm"}
    kept = []
    for task, metric, context, position in keys:
        is_part = any(task.startswith(f"{group}_") for group in tasks) and measure == "tasks"
        hidden = metric not in SHOWN.get(measure, (metric,))
        twice = metric == "acc" and task in normed
        same = measure == "positions" and metric == "nll" and position is None
        if not (is_part or hidden or twice or same):
            kept.append((task, metric, context, position))
    return kept


def _figure(result: Result | None) -> str:
    """A value, and its standard error where it has one."""
    if result is None:
        return ""
    if result.metric.endswith("bytes"):
        return ui.size(result.value)
    error = "" if result.stderr is None else f" ± {result.stderr:,.2g}"
    return f"{result.value:,.4g}{error}"


def _against(values: Mapping[str, dict[Key, Result]], key: Key) -> str:
    """The student's figure against the teacher's."""
    found = [values.get(name, {}).get(key) for name in ("teacher", "student")]
    if None in found:
        return ""
    teacher, student = (result.value for result in found if result is not None)
    if key[1].endswith(RATIOS):
        return f"{student / teacher:,.2f}x" if teacher else ""
    return f"{student - teacher:+,.3f}"
