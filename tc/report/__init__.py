"""What a run says at its end, and what a dry run says instead of it."""

from tc.report.recovery import draw_recovery
from tc.report.results import result_tables
from tc.report.summary import show_plan, show_summary, summary_tables

__all__ = ["draw_recovery", "result_tables", "show_plan", "show_summary", "summary_tables"]
