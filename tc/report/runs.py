"""Run folders, read: what they hold, how far they have come, and what is wrong with them.

Nothing here trusts what it reads. A folder may have been stopped in the middle, copied in part or
edited; it is then named with its reason, and the others are read all the same.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

from tc.artifacts import MANIFEST, read_json
from tc.errors import TCError
from tc.evaluate import Results, read_results
from tc.report.status import FAILED, SWEEP, Status, status_of, sweep_paths

SCIENCE, METRICS, RESULTS = "science.json", "metrics.json", "results.csv"
RECORDED = ("result.json", "curves.json")
"""What an experiment leaves beside its table: see `tc.report.recorded`."""

DEPTH = 4
"""Folders below a given one that are searched for runs."""

Scalar = str | int | float | bool | None

HEALTH = ("half_life", "beta", "gate_rms", "state_norm")
"""What is known of a recurrence, as `tc.recovery.health` names it."""


@dataclass
class Curve:
    """Points of one line.

    Attributes:
        kind: what it shows, a key of `tc.report.curves.KINDS`.
        label: what tells it from others of the same run and kind, such as a layer; may be empty.
        points: x and y.
    """

    kind: str
    label: str
    points: list[tuple[float, float]]


@dataclass
class Moment:
    """What the layers of a student were like at one moment of its making.

    Attributes:
        name: such as `init`, `align` or `recover, 16,384 tokens`.
        values: by quantity (`error` or one of `HEALTH`) and layer.
    """

    name: str
    values: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, quantity: str, layer: int, value: Any) -> None:
        """Takes a value, if it is a finite number."""
        if _is_number(value):
            self.values.setdefault(quantity, {})[layer] = float(value)


@dataclass
class Run:
    """A run folder.

    Attributes:
        path: the folder.
        name: of the folder; of several with one name, with as much of the path as tells them apart.
        science: the flat configuration that results follow from.
        metrics: the flat metrics; empty before the run's end.
        results: all that was measured, by model.
        environment: versions, hardware and commit.
        artifacts: key and file hashes of each artifact.
        status: how far it has come.
    """

    path: Path
    name: str
    science: dict[str, Any]
    metrics: dict[str, Any]
    results: Results
    environment: dict[str, Any]
    artifacts: dict[str, Any]
    status: Status

    @property
    def seed(self) -> Any:
        """The seed."""
        return self.science.get("seed")

    @cached_property
    def measured(self) -> dict[str, Scalar]:
        """Every single number of the run: its metrics, and results but those by position."""
        found: dict[str, Scalar] = dict(self.metrics)
        for model, results in self.results.items():
            for result in results:
                if result.position is None and result.measure != "perplexity":
                    found[f"{model}/{result.name}"] = result.value
        return found

    @cached_property
    def num_layers(self) -> int:
        """The layers of the model, or as many of them as are known."""
        path = self.path / "student" / "config.json"
        told = _object(path).get("num_hidden_layers") if path.is_file() else None
        seen = [layer for m in self.moments for values in m.values.values() for layer in values]
        least = max(seen, default=-1) + 1
        # A number beyond all reason would make a picture beyond all memory.
        return max(least, told) if isinstance(told, int) and 0 < told <= 10_000 else least

    @cached_property
    def moments(self) -> list[Moment]:
        """What the layers were like, in the order of the stages."""
        moments = []
        for stage in ("init", "align"):
            moment = Moment(stage)
            for layer, info in self._layer_infos(stage):
                moment.add("error", layer, info.get("error"))
                for quantity, value in _dict(info.get("health")).items():
                    if quantity in HEALTH:
                        moment.add(quantity, layer, value)
            moments.append(moment)
        tokens_before = 0.0
        for stage, history in self.histories.items():
            looks = [point for point in history if any(k.startswith("health/") for k in point)]
            for point in looks:
                tokens = tokens_before + point["tokens"]
                moment = Moment(f"{stage}, {tokens:,.0f} tokens")
                for key, value in point.items():
                    found = re.fullmatch(r"health/(\w+)/layer_(\d{1,4})", key)
                    if found and found[1] in HEALTH:
                        moment.add(found[1], int(found[2]), value)
                moments.append(moment)
            tokens_before += history[-1]["tokens"] if history else 0
        return [moment for moment in moments if moment.values]

    @cached_property
    def histories(self) -> dict[str, list[dict[str, float]]]:
        """The points of each stage of recovery, those of a stage that still runs included."""
        found = {}
        for stage in ("stage1", "stage2"):
            done = self.path / "recover" / stage / "done" / MANIFEST
            points = _info(done).get("history", []) if done.is_file() else self._logged(stage)
            good = [_numbers(point) for point in points if isinstance(point, dict)]
            if good := [point for point in good if "tokens" in point]:
                found[stage] = good
        return found

    @cached_property
    def curves(self) -> list[Curve]:
        """All curves of the run."""
        curves, before = [], 0.0
        lines: dict[str, list[tuple[float, float]]] = {}
        for history in self.histories.values():
            for point in history:
                for kind in ("perplexity", "perplexity_over_teacher", "loss"):
                    if kind in point:
                        at = (before + point["tokens"], point[kind])
                        lines.setdefault(kind, []).append(at)
            before += history[-1]["tokens"]
        curves += [Curve(kind, "", points) for kind, points in lines.items()]
        for stage in ("align", "blocks"):
            curves += self._alignments(stage)
        return [*curves, *self._by_position()]

    def _alignments(self, stage: str) -> Iterator[Curve]:
        """The held-out error of each layer or block, and their mean where they share steps."""
        each = []
        for layer, info in self._layer_infos(stage):
            history = [
                (float(p[0]), float(p[1]))
                for p in info.get("history", [])
                if isinstance(p, list) and len(p) == 2 and _is_number(p[0]) and _is_number(p[1])
            ]
            if history:
                what = "layer" if stage == "align" else "block from layer"
                each.append(Curve(f"{stage}_layers", f"{what} {layer}", history))
        # Layers are looked at after the same steps; one that was stopped early has fewer.
        steps = sorted({step for curve in each for step, _ in curve.points})
        known = [dict(curve.points) for curve in each]
        shared = [step for step in steps if all(step in points for points in known)]
        if shared:
            means = [(s, sum(points[s] for points in known) / len(known)) for s in shared]
            yield Curve(stage, "", means)
        yield from each

    def _by_position(self) -> Iterator[Curve]:
        for model, results in self.results.items():
            points = [
                (float(r.position), r.value)
                for r in results
                if r.position is not None and r.metric == "nll" and _is_number(r.value)
            ]
            if points:
                yield Curve("positions", model, sorted(points))

    def _layer_infos(self, stage: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """What the manifest of each layer's, or block's, mixer tells, in the order of layers."""
        for path in sorted((self.path / stage).glob(f"*_[0-9]*/{MANIFEST}")):
            yield int(path.parent.name.rsplit("_", 1)[1]), _info(path)

    def _logged(self, stage: str) -> list[dict[str, Any]]:
        """The points of a stage of recovery that were logged as it went."""
        path, prefix = self.path / "curves" / "metrics.csv", f"recover/{stage}/"
        if not (self.path / "recover" / stage).is_dir() or not path.is_file():
            return []
        with open(path, encoding="utf-8", newline="") as file:
            rows = [
                {k.removeprefix(prefix): v for k, v in row.items() if k and k.startswith(prefix)}
                for row in csv.DictReader(file)
            ]
        points: list[dict[str, Any]] = []
        for row in rows:
            try:
                points.append({k: float(v) for k, v in row.items() if v})
            except ValueError:
                continue  # the last line of a run that is writing now
        return points


@dataclass(frozen=True)
class Damaged:
    """A run folder that cannot be read.

    Attributes:
        path: the folder.
        reason: why.
    """

    path: Path
    reason: str


@dataclass
class Found:
    """What lies at the paths that a report is made of.

    Attributes:
        runs: run folders, in order.
        damaged: those that cannot be read.
        sweeps: folders with a `sweep.json`.
        recorded: files with the results of experiments.
    """

    runs: list[Run] = field(default_factory=list)
    damaged: list[Damaged] = field(default_factory=list)
    sweeps: list[Path] = field(default_factory=list)
    recorded: list[Path] = field(default_factory=list)


def read_run(path: Path, now: float | None = None) -> Run:
    """Reads a run folder.

    Args:
        path: the folder.
        now: the time that activity is measured against; the present one by default.

    Raises:
        TCError: if it is none, or a file of it is damaged; naming the file.
    """
    if not is_run(path) and (path / FAILED).is_file():
        raise TCError(f"it failed before it began: {status_of(path, {}, {}).why}")
    if not is_run(path):
        raise TCError(f"{path} is not the folder of a run: it has no {SCIENCE}.")
    science = _object(path / SCIENCE)
    metrics = _object(path / METRICS) if (path / METRICS).is_file() else {}
    for name, value in metrics.items():
        if not isinstance(value, Scalar):
            raise TCError(f"{path / METRICS} is damaged: {name} is no single value.")
    optional = {
        name: _object(path / f"{name}.json") if (path / f"{name}.json").is_file() else {}
        for name in ("environment", "artifacts")
    }
    results = read_results(path / RESULTS) if (path / RESULTS).is_file() else {}
    status = status_of(path, science, metrics, now)
    run = Run(path, path.name, science, metrics, results, status=status, **optional)
    _guarded(path, lambda: (run.measured, run.moments, run.curves, run.num_layers))
    return run


def _guarded(path: Path, read: Callable[[], Any]) -> None:
    """Reads what is read when it is needed, so that damage is found here and not there."""
    try:
        read()
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise TCError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def is_run(path: Path) -> bool:
    """Whether a folder is one of a run."""
    return (path / SCIENCE).is_file()


def find_runs(paths: Iterable[Path]) -> Found:
    """Reads all runs at some paths.

    Args:
        paths: run folders, folders of sweeps, or folders that hold such.

    Raises:
        TCError: naming every path that is not there.
    """
    paths = list(paths)
    if missing := [str(path) for path in paths if not path.is_dir()]:
        what = "is no folder" if len(missing) == 1 else "are no folders"
        raise TCError(f"{', '.join(missing)} {what}; give run folders, or folders that hold them.")
    found, folders = Found(), dict[Path, Path]()
    for path in paths:
        for folder in _walk(path, DEPTH):
            if (folder / SWEEP).is_file():
                found.sweeps.append(folder)
                for run in sweep_paths(folder):
                    folders.setdefault(run.resolve(), run)
            if is_run(folder) or (folder / FAILED).is_file():
                folders.setdefault(folder.resolve(), folder)
            found.recorded += [folder / name for name in RECORDED if (folder / name).is_file()]
    for folder in folders.values():
        try:
            found.runs.append(read_run(folder))
        except (TCError, OSError) as error:
            found.damaged.append(Damaged(folder, str(error)))
    _tell_apart(found.runs)
    return found


def _walk(path: Path, depth: int) -> Iterator[Path]:
    """A folder and those below it, but none inside a run."""
    yield path
    if is_run(path) or depth == 0:
        return
    try:
        below = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return
    for folder in below:
        if not folder.is_symlink():
            yield from _walk(folder, depth - 1)


def _tell_apart(runs: list[Run]) -> None:
    """Gives runs whose folders have one name as much of their paths as tells them apart."""
    runs_by_name = sorted(runs, key=lambda run: run.name)
    for _, group in groupby(runs_by_name, key=lambda run: run.name):
        same = list(group)
        parts = [run.path.resolve().parts for run in same]
        depth = 1
        while len({part[-depth:] for part in parts}) < len(same):
            depth += 1
        for run, part in zip(same, parts, strict=True):
            run.name = "/".join(part[-depth:])


def _object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise TCError(f"{path} is damaged: it holds no JSON object.")
    return value


def _info(path: Path) -> dict[str, Any]:
    return _dict(_object(path).get("info"))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _numbers(point: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in point.items() if _is_number(value)}
