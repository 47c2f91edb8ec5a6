"""The committed results of experiments, as tables and curves: `result.json` and `curves.json`.

`result.json` is an object with `rows`, a list of flat objects, and what it likes besides; or an
object of such objects. `curves.json` has points of recovery by label and seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from tc.artifacts import read_json
from tc.errors import TCError


@dataclass
class Recorded:
    """What one file holds.

    Attributes:
        title: where it lies.
        note: its date and machine, as far as it tells them.
        headings: columns of a table; empty where it holds curves.
        rows: of the table.
        curves: of each label and seed, tokens and perplexity over the teacher's.
    """

    title: str
    note: str = ""
    headings: list[str] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def read_recorded(path: Path) -> list[Recorded]:
    """The tables or the curves of a file.

    Raises:
        TCError: if it has neither.
    """
    content = read_json(path)
    title = "/".join(path.parent.parts[-2:])
    found = []
    if isinstance(content, dict):
        if path.name == "curves.json":
            found = [Recorded(title, curves=dict(_curves(content)))]
        else:
            parts = {"": content} if "rows" in content else content
            found = [
                _table(f"{title}, {name}" if name else title, part)
                for name, part in parts.items()
                if isinstance(part, dict) and isinstance(part.get("rows"), list)
            ]
    if found := [one for one in found if one.rows or one.curves]:
        return found
    raise TCError(f"{path} holds neither rows nor curves of an experiment.")


def _table(title: str, content: dict[str, Any]) -> Recorded:
    rows = [row for row in content["rows"] if isinstance(row, dict)]
    headings = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(key)) for key in headings] for row in rows]
    machine = content.get("machine", content.get("environment"))
    cpu = machine.get("cpu") if isinstance(machine, dict) else None
    note = ", ".join(str(fact) for fact in (content.get("date"), cpu) if fact)
    return Recorded(title, note, headings, cells)


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _curves(content: dict[str, Any]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    for label, seeds in content.items():
        for seed, points in seeds.items() if isinstance(seeds, dict) else ():
            line = [
                (float(point["tokens"]), float(point["perplexity_over_teacher"]))
                for point in (points if isinstance(points, list) else ())
                if isinstance(point, dict)
                and all(
                    isinstance(point.get(key), int | float) and isfinite(point[key])
                    for key in ("tokens", "perplexity_over_teacher")
                )
            ]
            if line:
                yield f"{label}, seed {seed}", line
