"""Tables of a sweep with the paper's figures beside them.

    python -m tc.report.compare experiments/zero_shot/table.yaml out/experiments --output FOLDER

A run and a published figure are of the same teacher only at the paper's scale. So what is compared
is what each of them is to its own teacher: `ratio` is the measured multiple of the teacher's figure
over the published one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tc.artifacts import read_json, write_json, write_text
from tc.config import read_config
from tc.errors import TCError, one_message
from tc.evaluate import Result, read_results
from tc.report.published import (
    STAGE1,
    STAGE2,
    ZERO_SHOT,
    figures,
    published,
    published_teacher,
)

FILES = ("config.yaml", "results.csv", "metrics.json", "environment.json")
"""What a run folder has once its run is finished."""

MACHINE = ("cpu", "gpus", "cores", "memory_bytes", "python", "packages")


@dataclass
class Table:
    """What a table compares: the contents of an `experiments/*/table.yaml`.

    Attributes:
        title: its heading.
        stages: the published stages that it has; runs of another are left out.
        beside: the published teacher that stands beside teachers which the paper does not have.
        metrics: by the paper's names, a table each; those that no run has are left out.
        inits, policies: by our names, in the order of the rows; other runs are left out.
        published_stage: where figures are looked up, if not under a run's own stage.
        lists: folder of policies with the published layers of a teacher, `TEACHER_POLICY.yaml`;
            with one a table shows layers, and how many of them the paper keeps as well.
    """

    title: str
    stages: list[str]
    beside: str
    metrics: list[str]
    inits: list[str]
    policies: list[str]
    published_stage: str | None = None
    lists: str | None = None


@dataclass
class Row:
    """One student's figure, over all seeds that were run.

    Attributes:
        metric: by the paper's name.
        text: what it was measured on.
        teacher, stage, share, policy, init: of the runs.
        tokens: of recovery, that the runs have seen.
        layers: that keep attention, of the first seed; empty where the folder has no student.
        in_common: how many of these the published list has, None where there is no list.
        values: the student's, by seed.
        teacher_value: the teacher's, mean over seeds (another seed measures other text).
        beside: the published teacher.
        published, published_teacher: its figures, None where there are none.
    """

    metric: str
    text: str
    teacher: str
    stage: str
    share: float
    policy: str
    init: str
    tokens: int
    layers: list[int]
    in_common: int | None
    values: dict[int, float]
    teacher_value: float
    beside: str
    published: float | None
    published_teacher: float | None

    @property
    def over_teacher(self) -> float:
        """The student's mean over the teacher's; not a number where the teacher scores nothing."""
        mean = statistics.fmean(self.values.values())
        return mean / self.teacher_value if self.teacher_value else math.nan

    @property
    def published_over_teacher(self) -> float | None:
        """The same as published."""
        if self.published is None or not self.published_teacher:
            return None
        return self.published / self.published_teacher

    @property
    def ratio(self) -> float | None:
        """How many times the published multiple ours is: under 1 is less loss, or less skill."""
        theirs = self.published_over_teacher
        return self.over_teacher / theirs if theirs else None


@dataclass
class Run:
    """What a table needs of a run folder."""

    folder: Path
    config: Any
    results: dict[str, list[Result]]
    environment: dict[str, Any]
    kept: list[int] = field(default_factory=list)
    num_layers: int = 0

    @property
    def stage(self) -> str | None:
        """The published stage that it is of: by which stages of recovery it has."""
        recovery = self.config.recovery
        has = bool(recovery.stage1.tokens), bool(recovery.stage2.tokens)
        return {(False, False): ZERO_SHOT, (True, False): STAGE1, (True, True): STAGE2}.get(has)

    @property
    def tokens(self) -> int:
        """Of recovery."""
        recovery = self.config.recovery
        return int(recovery.stage1.tokens + recovery.stage2.tokens)

    @property
    def share(self) -> float:
        """Of the layers that keep attention: as asked for, else as it came out."""
        asked = self.config.policy.share
        return float(asked) if asked is not None else len(self.kept) / max(self.num_layers, 1)


def read_table(path: Path) -> Table:
    """Reads what a table compares.

    Raises:
        TCError: naming what it lacks or has too much.
    """
    try:
        tree = OmegaConf.merge(OmegaConf.structured(Table), OmegaConf.load(path))
        table = OmegaConf.to_object(tree)
    except (OSError, OmegaConfBaseException) as error:
        reason = str(error).splitlines()[0]
        raise TCError(f"{path} does not say what a table compares: {reason}") from error
    assert isinstance(table, Table)
    known = {figure.metric for figure in figures()}
    problems = [
        f"metrics: {name} is not published; there are {', '.join(sorted(known))}"
        for name in table.metrics
        if name not in known
    ]
    if table.beside not in {figure.teacher for figure in figures()}:
        problems.append(f"beside: {table.beside} is no teacher of the paper")
    if problems:
        raise one_message(problems, f"{path} cannot be made:")
    return table


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """The finished runs among folders and the folders in them.

    Raises:
        TCError: if there are none.
    """
    paths = list(paths)
    folders = [folder for path in paths for folder in (path, *sorted(path.glob("*")))]
    runs = [_read(f) for f in dict.fromkeys(folders) if all((f / n).is_file() for n in FILES)]
    if not runs:
        given = ", ".join(map(str, paths))
        raise TCError(f"no finished run in {given}: give run folders, or the folder they lie in.")
    return runs


def _read(folder: Path) -> Run:
    run = Run(
        folder=folder,
        config=read_config(folder / "config.yaml"),
        results=read_results(folder / "results.csv"),
        environment=read_json(folder / "environment.json"),
    )
    student = folder / "student" / "config.json"
    if student.is_file():
        facts = read_json(student)
        run.num_layers = facts["num_hidden_layers"]
        run.kept = [i for i in range(run.num_layers) if i not in facts["gdn"]["layers"]]
    return run


def measured(results: Sequence[Result], metric: str) -> Result | None:
    """A model's own figure for a published metric, or None.

    Perplexity is that on WikiText-2 where it was measured, else on the run's held-out text; RULER
    is that at the published length, else at the longest.
    """
    if metric == "wikitext2_ppl":
        found = [r for m in ("corpus", "perplexity") for r in results if r.measure == m]
        return next((r for r in found if r.metric == "perplexity"), None)
    task, _, name = metric.partition("/")
    if not name.isdigit():
        kind = (("tasks", task), name)
        return next((r for r in results if ((r.measure, r.task), r.metric) == kind), None)
    found = [r for r in results if (r.measure, r.task) == ("ruler", task)]
    at = {r.context or 0: r for r in found}
    return at.get(int(name)) or (at[max(at)] if at else None)


def make_rows(table: Table, runs: Iterable[Run], folder: Path) -> list[Row]:
    """The rows of a table: a metric, a teacher, a stage, a share, a policy and an init each.

    Args:
        table: what it compares.
        runs: finished ones, of which some may be of other tables.
        folder: the one that `table.lists` starts from.
    """
    groups: dict[tuple[Any, ...], dict[int, Run]] = defaultdict(dict)
    for run in runs:
        cfg, stage = run.config, run.stage
        if stage is None or stage not in table.stages:
            continue
        if cfg.init.name in table.inits and cfg.policy.name in table.policies:
            key = (cfg.teacher.name, stage, run.share, cfg.policy.name, cfg.init.name)
            _require_one(groups[key].setdefault(cfg.seed, run), run)
    rows = [
        row
        for metric in table.metrics
        for key, seeds in groups.items()
        if (row := _row(table, metric, key, seeds, folder))
    ]
    orders = (table.stages, table.policies, table.inits)

    def place(row: Row) -> tuple[Any, ...]:
        named = zip(orders, (row.stage, row.policy, row.init), strict=True)
        stage, policy, init = (order.index(name) for order, name in named)
        return (table.metrics.index(row.metric), row.teacher, stage, row.share, policy, init)

    return sorted(rows, key=place)


def _require_one(first: Run, second: Run) -> None:
    if first is not second:
        raise TCError(
            f"{first.folder} and {second.folder} have the same teacher, policy, share, init and "
            "seed, and differ in something else; give the runs of one sweep alone."
        )


def _row(
    table: Table, metric: str, key: tuple[Any, ...], seeds: dict[int, Run], folder: Path
) -> Row | None:
    teacher, stage, share, policy, init = key
    found = {seed: measured(run.results["student"], metric) for seed, run in seeds.items()}
    students = {seed: result for seed, result in sorted(found.items()) if result}
    teachers = [measured(seeds[seed].results["teacher"], metric) for seed in students]
    if not students:
        return None
    first = next(iter(students.values()))
    length = f" at {first.context:,} tokens" if first.context else ""
    theirs = {figure.teacher for figure in figures()}
    beside = teacher if teacher in theirs else table.beside
    at = table.published_stage or stage
    kept = seeds[next(iter(students))].kept
    return Row(
        metric=metric,
        text=f"{first.task.replace('_', ' ')}{length}",
        teacher=teacher,
        stage=stage,
        share=share,
        policy=policy,
        init=init,
        tokens=seeds[next(iter(students))].tokens,
        layers=kept,
        in_common=_in_common(table, folder, teacher, policy, kept),
        values={seed: result.value for seed, result in students.items()},
        teacher_value=statistics.fmean(result.value for result in teachers if result),
        beside=beside,
        published=published(beside, at, share, policy, init, metric),
        published_teacher=published_teacher(beside, at, metric),
    )


def _in_common(
    table: Table, folder: Path, teacher: str, policy: str, kept: list[int]
) -> int | None:
    path = folder / (table.lists or "") / f"{teacher}_{policy}.yaml"
    if table.lists is None or not path.is_file():
        return None
    return len(set(kept) & set(OmegaConf.load(path).keep))


def markdown(table: Table, rows: Sequence[Row]) -> str:
    """One table a metric, in Markdown."""
    parts = [f"# {table.title}", ""]
    for metric in dict.fromkeys(row.metric for row in rows):
        chosen = [row for row in rows if row.metric == metric]
        texts = ", ".join(dict.fromkeys(row.text for row in chosen))
        layers = ["layers", "in the paper's list"] if table.lists else []
        head = ["teacher", "tokens", "kept", "policy", "init", *layers, "measured", "x teacher"]
        head += ["published", "of", "after", "x teacher", "ratio"]
        parts += [f"## {metric}, here on {texts}", "", _line(head), "|---" * len(head) + "|"]
        parts += [_line(_cells(row, bool(table.lists))) for row in chosen]
        parts.append("")
    return "\n".join(parts)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(row: Row, with_layers: bool) -> list[str]:
    values = list(row.values.values())
    spread = f" +- {_number(statistics.stdev(values))} ({len(values)})" if len(values) > 1 else ""
    common = "" if row.in_common is None else f"{row.in_common} of {len(row.layers)}"
    layers = [", ".join(map(str, row.layers)), common] if with_layers else []
    return [
        *(row.teacher, f"{row.tokens:,}", f"{row.share:.0%}", row.policy, row.init),
        *layers,
        _number(statistics.fmean(values)) + spread,
        _number(row.over_teacher),
        _number(row.published),
        *((row.beside, row.stage.replace("_", " ")) if row.published is not None else ("", "")),
        _number(row.published_over_teacher),
        _number(row.ratio),
    ]


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def write_table(table: Table, rows: Sequence[Row], runs: Sequence[Run], output: Path) -> None:
    """Writes `table.md`, and `result.json` with day, commits and machine."""
    environment = runs[0].environment
    facts = {
        "date": datetime.date.today().isoformat(),
        "git_commits": sorted({str(run.environment.get("git_commit")) for run in runs}),
        "uncommitted_changes": any(run.environment.get("git_dirty") for run in runs),
        "machine": {key: environment.get(key) for key in MACHINE},
        "rows": [_plain(row) for row in rows],
    }
    write_json(output / "result.json", facts)
    write_text(output / "table.md", markdown(table, rows))


def _plain(row: Row) -> dict[str, Any]:
    """A row as JSON, which has no NaN."""
    ratios = {
        "over_teacher": row.over_teacher,
        "published_over_teacher": row.published_over_teacher,
        "ratio": row.ratio,
    }
    facts = {**asdict(row), **ratios}
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in facts.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser("tc.report.compare", description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="what is compared: experiments/NAME/table.yaml")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, or folders of them")
    parser.add_argument("--teacher", help="only the runs of this one")
    parser.add_argument("--output", type=Path, help="folder for table.md and result.json")
    given = parser.parse_args(arguments)
    try:
        table, runs = read_table(given.table), find_runs(given.runs)
        runs = [run for run in runs if given.teacher in (None, run.config.teacher.name)]
        rows = make_rows(table, runs, given.table.parent)
        if not rows:
            raise TCError(
                f"no run has what {given.table} compares: "
                + json.dumps({"stages": table.stages, "inits": table.inits})
            )
        if given.output:
            write_table(table, rows, runs, given.output)
    except TCError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(markdown(table, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
