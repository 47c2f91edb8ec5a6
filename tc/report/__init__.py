"""What a run says at its end, and what a dry run says instead of it."""

from tc.report.recovery import draw_recovery
from tc.report.results import result_tables
from tc.report.selection import COLUMNS as SELECTION_COLUMNS
from tc.report.selection import selection_rows, write_selection
from tc.report.summary import show_plan, show_summary, summary_tables

__all__ = [
    "SELECTION_COLUMNS",
    "draw_recovery",
    "result_tables",
    "selection_rows",
    "show_plan",
    "show_summary",
    "summary_tables",
    "write_selection",
]
