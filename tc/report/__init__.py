"""What a run says at its end, what a dry run says instead, and reports of many runs."""

from tc.report.frame import Group, Spread, frame, groups, measures, results_frame
from tc.report.recovery import draw_recovery
from tc.report.results import result_tables
from tc.report.runs import Run, find_runs, read_run
from tc.report.selection import COLUMNS as SELECTION_COLUMNS
from tc.report.selection import selection_rows, write_selection
from tc.report.status import State, Status, Sweep, read_sweep
from tc.report.summary import show_plan, show_summary, summary_tables
from tc.report.tables import (
    SeedTable,
    latex,
    latex_table,
    markdown,
    markdown_table,
    seed_table,
    to_csv,
)

__all__ = [
    "SELECTION_COLUMNS",
    "Group",
    "Run",
    "SeedTable",
    "Spread",
    "State",
    "Status",
    "Sweep",
    "draw_recovery",
    "find_runs",
    "frame",
    "groups",
    "latex",
    "latex_table",
    "markdown",
    "markdown_table",
    "measures",
    "read_run",
    "read_sweep",
    "result_tables",
    "results_frame",
    "seed_table",
    "selection_rows",
    "show_plan",
    "show_summary",
    "summary_tables",
    "to_csv",
    "write_selection",
]
