"""`python -m tc.report PATH...`: tables, curves and one page of runs and sweeps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from tc import ui
from tc.artifacts import disk_errors, write_text
from tc.errors import TCError
from tc.report.curves import draw_curves
from tc.report.frame import frame, groups, measures
from tc.report.page import Report, page
from tc.report.recorded import Recorded, read_recorded
from tc.report.runs import Damaged, Found, find_runs
from tc.report.status import State, Sweep, read_sweep
from tc.report.tables import SeedTable, latex, markdown, number, seed_table, to_csv

FORMATS = ("html", "md", "latex", "csv", "png", "svg")
ON_SCREEN = (
    *("student/perplexity_zero_shot", "student/perplexity"),
    "student/perplexity_over_teacher",
)
"""The measures that the screen has room for, where none are asked for."""

SHOWN = 20
"""Rows and folders that the screen shows at most."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line; one message where it cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m tc.report", description=__doc__)
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="PATH", help="a run, a sweep, or a folder of such"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("out/report"), help="the folder to fill"
    )
    parser.add_argument(
        "--format", default="html,md,csv", help=f"of {','.join(FORMATS)} (default: html,md,csv)"
    )
    parser.add_argument(
        "--metric", nargs="+", default=[], help="what tables show: names, or patterns as student/*"
    )
    parser.add_argument(
        "--spread", choices=("std", "stderr"), default="std", help="over seeds (default: std)"
    )
    parser.add_argument("--title", help="of the page")
    given = parser.parse_args(arguments)
    try:
        make(given.paths, given.output, given.format, given.metric, given.spread, given.title)
    except TCError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def make(
    paths: Sequence[Path],
    output: Path,
    formats: str = "html,md,csv",
    metric: Sequence[str] = (),
    spread: str = "std",
    title: str | None = None,
) -> list[Path]:
    """Reads runs and writes their report.

    Args:
        paths: run folders, sweeps, or folders that hold such.
        output: the folder to fill; what is there under the same names is replaced.
        formats: which files, joined by commas.
        metric: measures or patterns; none for the usual ones.
        spread: over seeds, `std` or `stderr`.
        title: of the page.

    Returns:
        The files.

    Raises:
        TCError: if a path or a name is wrong, or nothing is found.
    """
    wanted = _formats(formats)
    if output.exists() and not output.is_dir():
        raise TCError(f"--output {output} is a file; give a folder.")
    found = find_runs(paths)
    damaged = list(found.damaged)
    sweeps = _read_sweeps(found, damaged)
    recorded = _read_recorded(found, damaged)
    if not (found.runs or sweeps or recorded):
        raise _nothing(paths, damaged)
    names = measures(found.runs, metric) if found.runs else []
    table = seed_table(groups(found.runs), names, spread)
    name = title or ", ".join(path.resolve().name for path in paths[:3])
    report = Report(name, table, damaged, sweeps, recorded)
    files = {}
    if "html" in wanted:
        files["report.html"] = page(report)
    if found.runs:
        if "md" in wanted:
            files["table.md"] = markdown(table)
        if "latex" in wanted:
            files["table.tex"] = latex(table)
        if "csv" in wanted:
            files["table.csv"] = to_csv(table)
            files["runs.csv"] = frame(found.runs).to_csv(index=False, lineterminator="\n")
    with disk_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            write_text(output / file, text)
    pictures = [ending for ending in ("png", "svg") if ending in wanted]
    drawn = draw_curves(table.groups, output, pictures) if pictures else []
    written = [*(output / file for file in files), *drawn]
    short = [name for name in names if name in ON_SCREEN] if not metric else names
    _show(report, replace(table, measures=short or names[:3]), written)
    return written


def _formats(text: str) -> list[str]:
    given = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in given if word not in FORMATS]
    if unknown or not given:
        raise TCError(f"--format {text}: a list of {', '.join(FORMATS)}, joined by commas.")
    return given


def _read_sweeps(found: Found, damaged: list[Damaged]) -> list[Sweep]:
    sweeps = []
    for folder in found.sweeps:
        try:
            sweeps.append(read_sweep(folder))
        except TCError as error:
            damaged.append(Damaged(folder, str(error)))
    return sweeps


def _read_recorded(found: Found, damaged: list[Damaged]) -> list[Recorded]:
    recorded = []
    for path in found.recorded:
        try:
            recorded += read_recorded(path)
        except TCError as error:
            damaged.append(Damaged(path, str(error)))
    return recorded


def _nothing(paths: Sequence[Path], damaged: Sequence[Damaged]) -> TCError:
    where = ", ".join(str(path) for path in paths)
    if damaged:
        lines = [f"  - {one.path}: {one.reason}" for one in damaged]
        return TCError("\n".join([f"no run in {where} can be read:", *lines]))
    return TCError(
        f"no runs in {where}: give a run folder (it has science.json), a sweep's folder (it has "
        "sweep.json), or a folder that holds such, as out/."
    )


def _show(report: Report, table: SeedTable, written: Sequence[Path]) -> None:
    """Prints a short table, what is wrong, what was written, and what to do next."""
    rows = [
        [*table.heads(group), *(number(s, " ± ") for s in table.spreads(group))]
        for group in table.groups
    ]
    if rows:
        states = [run.status.state for run in report.runs]
        counts = ", ".join(f"{states.count(s)} {s.value}" for s in State if s in states)
        cells = [[escape(cell) for cell in row] for row in rows[:SHOWN]]
        ui.table(f"{len(states)} runs: {counts}", [*map(escape, table.headings)], cells)
    if len(rows) > SHOWN:
        ui.say(f"and {len(rows) - SHOWN} more")
    for sweep in report.sweeps:
        counts = ", ".join(f"{sweep.count(s)} {s.value}" for s in State if sweep.count(s))
        ui.plain(f"\nsweep {sweep.path}: {counts}")
        for job in sweep.jobs[: 5 * SHOWN]:
            if job.status.state is State.failed:
                ui.plain(f"  job {job.number} failed: {job.status.why}")
        if sweep.commands:
            ui.plain("what is neither done nor running is run by:\n")
            for command in sweep.commands:
                ui.plain(f"    {command}")
    if report.damaged:
        ui.plain(f"\n{len(report.damaged)} cannot be read and are left out:")
        for one in report.damaged[:SHOWN]:
            ui.plain(f"  - {one.path}: {one.reason}")
        if len(report.damaged) > SHOWN:
            ui.plain(f"  and {len(report.damaged) - SHOWN} more, all named in the page")
    ui.plain("\nwritten:")
    for path in written:
        ui.plain(f"  {path}")
    pages = [path for path in written if path.suffix == ".html"]
    if pages:
        ui.plain(f"\nnext, open it in a browser: {pages[0].resolve().as_uri()}")


if __name__ == "__main__":
    sys.exit(main())
