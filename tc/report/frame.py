"""Runs as a data frame: a row a run, a column a number or a configuration key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import pandas as pd

from tc.errors import TCError
from tc.report.runs import Run
from tc.report.status import State

MEASURES = (
    *("teacher/perplexity", "copy_only/perplexity", "student/perplexity_zero_shot"),
    *("student/perplexity", "student/perplexity_over_teacher"),
    *("initialise/relative_error", "align/relative_error", "blocks/relative_error"),
    "total/seconds",
)
"""What a table shows unless it is told otherwise, besides all else that was measured."""

FACTS = ("run", "status", "path")
"""Columns that are neither configuration nor measured."""

CONFIG = "config."
"""How the columns of the configuration begin, so that none is taken for a measure."""


def frame(runs: Sequence[Run]) -> pd.DataFrame:
    """All runs: `FACTS`, then `config.<key>` for the configuration, then what was measured.

    What a run does not have is missing there. A list of the configuration is its JSON text.

    Args:
        runs: as read.
    """
    rows = [
        {
            "run": run.name,
            "status": run.status.state.value,
            "path": str(run.path),
            **{f"{CONFIG}{key}": _cell(value) for key, value in run.science.items()},
            **run.measured,
        }
        for run in runs
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    facts = [name for name in columns if name in FACTS]
    config = [name for name in columns if name.startswith(CONFIG)]
    rest = [name for name in columns if name not in {*facts, *config}]
    return pd.DataFrame(rows, columns=[*facts, *config, *rest])


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def results_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """Every row of every run's `results.csv`, with the run's name first: the long format."""
    rows = [
        {"run": run.name, "model": model, **result.to_dict()}
        for run in runs
        for model, results in run.results.items()
        for result in results
    ]
    return pd.DataFrame(rows)


def differing(runs: Sequence[Run]) -> list[str]:
    """The configuration keys that are not the same in all runs, in their order."""
    keys = dict.fromkeys(key for run in runs for key in run.science)
    return [key for key in keys if len({_text(run, key) for run in runs}) > 1]


def telling(runs: Sequence[Run]) -> list[str]:
    """Of the keys that differ, those that tell the runs apart, the seed left out.

    A choice such as `init=full` sets many keys. Where the names of what was chosen say all that
    another key says, that key is left out.
    """
    keys = [key for key in differing(runs) if key != "seed"]
    names = [key for key in keys if key.endswith(".name")]
    told: list[str] = []
    for key in [*names, *(key for key in keys if key not in names)]:
        if not _follows(runs, key, told):
            told.append(key)
    return sorted(told, key=keys.index)


def _follows(runs: Sequence[Run], key: str, others: Sequence[str]) -> bool:
    """Whether the values of some keys settle that of another, in these runs."""
    seen: dict[tuple[str, ...], str] = {}
    for run in runs:
        given = tuple(_text(run, other) for other in others)
        if seen.setdefault(given, _text(run, key)) != _text(run, key):
            return False
    return True


def _text(run: Run, key: str) -> str:
    return json.dumps(run.science[key], sort_keys=True) if key in run.science else ""


@dataclass
class Group:
    """Runs that differ in their seed only.

    Attributes:
        label: what tells the group from the others, such as `init=full, policy=every4`.
        config: the keys that tell it, and their values.
        runs: in the order of their seeds.
    """

    label: str
    config: dict[str, Any]
    runs: list[Run] = field(default_factory=list)

    @property
    def done(self) -> list[Run]:
        """The finished runs, whose numbers count."""
        return [run for run in self.runs if run.status.state is State.done]

    def spread(self, measure: str, kind: str = "std") -> Spread | None:
        """A measure's mean over the finished runs that have it; None where none has.

        Args:
            measure: a column of `frame`.
            kind: `std`, of a single run (n - 1), or `stderr`, of the mean.
        """
        found = [run.measured.get(measure) for run in self.done]
        values = [float(v) for v in found if isinstance(v, int | float) and not pd.isna(v)]
        if not values:
            return None
        column = pd.Series(values)
        if len(values) == 1:
            return Spread(values[0], None, 1)
        width = column.std() if kind == "std" else column.sem()
        return Spread(float(column.mean()), float(width), len(values))


@dataclass(frozen=True)
class Spread:
    """A mean over seeds.

    Attributes:
        mean: of the runs.
        width: standard deviation or standard error; None of a single run.
        n: the number of runs.
    """

    mean: float
    width: float | None
    n: int


def groups(runs: Sequence[Run]) -> list[Group]:
    """Runs by what they share but the seed, in the order in which they first come."""
    keys = telling(runs)
    found: dict[str, Group] = {}
    for run in runs:
        same = {key: value for key, value in run.science.items() if key != "seed"}
        config = {key: run.science.get(key) for key in keys}
        group = found.setdefault(json.dumps(same, sort_keys=True), Group(_label(config), config))
        group.runs.append(run)
    for group in found.values():
        group.runs.sort(key=lambda run: run.seed if isinstance(run.seed, int) else -1)
        if not group.config:
            group.label = _label({k: v for k, v in group.runs[0].science.items() if k in NAMES})
    return list(found.values())


NAMES = ("teacher.name", "policy.name", "init.name")
"""What names a group where nothing tells it from others."""


def _label(config: dict[str, Any]) -> str:
    return ", ".join(f"{key.removesuffix('.name')}={_cell(v)}" for key, v in config.items())


def measures(runs: Sequence[Run], wanted: Sequence[str] = ()) -> list[str]:
    """The measures that a table of runs shows.

    Args:
        runs: whose.
        wanted: names or patterns such as `student/*`; none for the usual ones.

    Raises:
        TCError: if one matches nothing, with what comes near.
    """
    known = dict.fromkeys(
        key
        for run in runs
        for key, value in run.measured.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    )
    if not wanted:
        usual = [name for name in MEASURES if name in known]
        # Of what was measured besides, the student's: the teacher's is the same in every run.
        asked = [
            f"student/{result.name}"
            for run in runs
            for result in run.results.get("student", ())
            if result.position is None and result.measure != "perplexity"
        ]
        return list(dict.fromkeys([*usual, *asked]))
    found: dict[str, None] = {}
    for pattern in wanted:
        hits = [name for name in known if fnmatchcase(name, pattern)]
        if not hits:
            near = get_close_matches(pattern, known, 3, 0.3) or list(known)[:3]
            listed = f"; near it are {', '.join(near)}" if near else ""
            raise TCError(
                f"--metric {pattern}: no run here has such a number{listed}. A pattern such as "
                "'student/*' works too; runs.csv has all names."
            )
        found.update(dict.fromkeys(hits))
    return list(found)
