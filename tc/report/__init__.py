"""What a run says at its end, and what a dry run says instead of it."""

from tc.report.summary import show_plan, show_summary

__all__ = ["show_plan", "show_summary"]
