"""One HTML page that holds everything: it opens from disk, and asks nothing of a network.

What is read from run folders is data and never markup: it stands in the page as JSON in which no
tag can begin or end, the page's program puts it there as text alone, and the page's own policy lets
no other program run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.resources import files
from math import isfinite
from typing import Any

from tc import __version__
from tc.report.curves import COLOURS, KINDS, Kind, lines, thinned
from tc.report.frame import _cell, differing
from tc.report.recorded import Recorded
from tc.report.runs import Damaged, Run
from tc.report.status import State, Sweep
from tc.report.tables import SHORT, SeedTable, number

POINTS = 24_000
"""So many points of one kind of curve are on the page at most, over all runs."""

LINE_POINTS = (24, 160)
"""So many of a line, at least and at most."""

MOMENTS = 24
"""So many moments of a run are on the page at most; the first and the last are among them."""

MANY = 40
"""Beyond so many runs, only the first and the last moment of each."""

QUANTITIES = {
    "error": ("Error", "relative squared error of the layer's output, on selection tokens", True),
    "half_life": ("Half-life", "tokens until half of a state is forgotten, median head", True),
    "beta": ("Write strength", "mean beta", False),
    "gate_rms": ("Output gate", "root mean square of the output gate", False),
    "state_norm": ("State", "mean norm of a head's last state", True),
}
"""Of the heat maps: name, what it is, whether its colours go by its logarithm."""


@dataclass
class Report:
    """What a page tells.

    Attributes:
        title: of the page.
        table: groups by measures.
        damaged: folders that were left out.
        sweeps: their jobs.
        recorded: results of experiments.
    """

    title: str
    table: SeedTable
    damaged: Sequence[Damaged] = field(default_factory=list)
    sweeps: Sequence[Sweep] = field(default_factory=list)
    recorded: Sequence[Recorded] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        """All runs, in the order of their groups."""
        return [run for group in self.table.groups for run in group.runs]


def page(report: Report) -> str:
    """The page's HTML.

    Args:
        report: what it tells.
    """
    style, program, frame = (
        files("tc.report").joinpath("assets", f"page.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js", "html")
    )
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    parts = {
        "@POLICY@": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "@TITLE@": html.escape(report.title),
        "@STYLE@": style,
        "@DATA@": as_json(_data(report)),
        "@PROGRAM@": program,
    }
    # Cut once: nothing that has been put in is looked at again.
    out, rest = [], frame
    for mark, text in parts.items():
        before, rest = rest.split(mark, 1)
        out += [before, text]
    return "".join([*out, rest])


def as_json(value: Any) -> str:
    """JSON that may stand inside a script element: no tag can end or begin in it."""
    text = json.dumps(_finite(value), separators=(",", ":"), ensure_ascii=True, default=str)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _finite(value: Any) -> Any:
    """A value without what JSON has no word for, and with the digits that a page can show."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _data(report: Report) -> dict[str, Any]:
    runs, table = report.runs, report.table
    keys = differing(runs)
    states = [run.status.state for run in runs]
    first = runs[0].science if runs else {}
    return {
        "title": report.title,
        "made": datetime.now().astimezone().isoformat(" ", "minutes"),
        "version": __version__,
        "colours": COLOURS,
        "spread": table.kind,
        "states": {state.value: states.count(state) for state in State if state in states},
        "headings": table.headings,
        "measures": [{"name": name, "short": SHORT.get(name, name)} for name in table.measures],
        "keys": table.keys,
        "differing": keys,
        "common": {key: _cell(value) for key, value in first.items() if key not in keys},
        "groups": [
            {
                "label": group.label,
                "heads": table.heads(group),
                "cells": [
                    {"text": number(s, " ± "), "value": s.mean} if s else None
                    for s in table.spreads(group)
                ],
            }
            for group in table.groups
        ],
        "runs": [
            {
                "name": run.name,
                "path": str(run.path),
                "group": index,
                "state": run.status.state.value,
                "stage": run.status.stage,
                "why": run.status.why,
                "seed": run.seed,
                "config": {key: _cell(run.science.get(key)) for key in keys},
                "values": [run.measured.get(name) for name in table.measures],
            }
            for index, group in enumerate(table.groups)
            for run in group.runs
        ],
        "charts": _charts(report),
        "heat": _heat(runs),
        "provenance": _provenance(runs),
        "sweeps": [_sweep(sweep) for sweep in report.sweeps],
        "damaged": [{"path": str(one.path), "reason": one.reason} for one in report.damaged],
        "recorded": [
            {"title": one.title, "note": one.note, "headings": one.headings, "rows": one.rows}
            for one in report.recorded
            if one.rows
        ],
    }


def _charts(report: Report) -> list[dict[str, Any]]:
    numbers = {run.name: index for index, run in enumerate(report.runs)}
    charts, found = [], lines(report.table.groups)
    for name, kind in KINDS.items():
        own = [line for line in found if line.kind == name]
        least, most = LINE_POINTS
        each = min(most, max(least, POINTS // max(1, len(own))))
        drawn = [
            {
                "group": line.group,
                "run": numbers[line.run],
                "label": line.label,
                "points": thinned(line.points, each),
            }
            for line in own
        ]
        if drawn:
            charts.append(_chart(name, kind, kind.title, drawn))
    for one in report.recorded:
        drawn = [
            {"group": None, "run": None, "label": label, "points": thinned(points, 160)}
            for label, points in one.curves.items()
        ]
        if drawn:
            kind = KINDS["perplexity_over_teacher"]
            charts.append(_chart("recorded", kind, f"{kind.title}: {one.title}", drawn))
    return charts


def _chart(name: str, kind: Kind, title: str, drawn: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kind": name,
        "title": title,
        "x": kind.x,
        "y": kind.y,
        "logX": kind.log_x,
        "logY": kind.log_y,
        "reference": kind.reference,
        "lines": drawn,
    }


def _heat(runs: list[Run]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        moments = run.moments
        keep = MOMENTS if len(runs) <= MANY else 2
        if len(moments) > keep:
            moments = [moments[round(i * (len(moments) - 1) / (keep - 1))] for i in range(keep)]
        for moment in moments:
            values = {
                quantity: [layers.get(layer) for layer in range(run.num_layers)]
                for quantity, layers in moment.values.items()
            }
            rows.append({"run": index, "moment": moment.name, "values": values})
    present = {quantity for row in rows for quantity in row["values"]}
    return {
        "rows": rows,
        "quantities": [
            {"key": key, "title": title, "what": what, "log": log}
            for key, (title, what, log) in QUANTITIES.items()
            if key in present
        ],
    }


HASHED = {
    "student": "student",
    "calibration": "calibration",
    "data": "data",
    "training text": "training text",
}
"""Artifacts whose keys the provenance shows, by what they are called in `artifacts.json`."""


def _provenance(runs: list[Run]) -> dict[str, Any]:
    machines: dict[str, dict[str, Any]] = {}
    rows = []
    for run in runs:
        facts = dict(run.environment)
        own = {key: facts.pop(key, None) for key in ("git_commit", "git_dirty", "code")}
        packages = facts.pop("packages", None)
        flat = {**facts, **(packages if isinstance(packages, dict) else {})}
        text = json.dumps(flat, sort_keys=True, default=str)
        flat = {key: _cell(value) for key, value in flat.items()}
        machine = machines.setdefault(text, {"number": len(machines), "facts": flat, "runs": 0})
        machine["runs"] += 1
        commit = str(own["git_commit"] or "unknown")[:12]
        keys = [_artifact(run, name, "key") for name in HASHED.values()]
        rows.append(
            [
                run.name,
                commit + (" and changes" if own["git_dirty"] else ""),
                own["code"],
                *keys,
                _weights(run),
                f"environment {machine['number'] + 1}" if flat else "unknown",
            ]
        )
    headings = ["run", "commit", "code", *HASHED, "weights (SHA-256)", "environment"]
    return {"headings": headings, "rows": rows, "machines": list(machines.values())}


def _artifact(run: Run, name: str, fact: str) -> str | None:
    artifact = run.artifacts.get(name)
    return str(artifact.get(fact)) if isinstance(artifact, dict) and fact in artifact else None


def _weights(run: Run) -> str | None:
    """The hash of the student's weights, its first digits."""
    artifact = run.artifacts.get("student")
    files = artifact.get("files") if isinstance(artifact, dict) else None
    for name, facts in files.items() if isinstance(files, dict) else ():
        if name.endswith(".safetensors") and isinstance(facts, dict):
            return str(facts.get("sha256"))[:16]
    return None


def _sweep(sweep: Sweep) -> dict[str, Any]:
    return {
        "path": str(sweep.path),
        "launcher": sweep.launcher,
        "created": sweep.created,
        "states": {s.value: sweep.count(s) for s in State if sweep.count(s)},
        "commands": sweep.commands,
        "jobs": [
            [
                job.number,
                job.name,
                job.status.state.value,
                job.status.stage,
                job.status.why,
                " ".join(job.overrides),
            ]
            for job in sweep.jobs
        ],
    }
