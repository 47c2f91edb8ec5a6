"""What a person sees: the configuration, progress, the stage table, the summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

console = Console(highlight=False)


class _Speed(ProgressColumn):
    """Units done per second, such as tokens/s."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """The speed, or nothing before the first step."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.4g} {self.unit}/s")


@contextmanager
def progress(what: str, total: int, unit: str = "tokens") -> Iterator[Callable[[int], None]]:
    """A bar with speed and time left; yields what is told how much each step has done."""
    with _bar(what, total, unit) as (bar, task):
        yield lambda done: bar.advance(task, done)


@contextmanager
def counting(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """The same where the total is found out on the way; yields what is told both, each time."""
    with _bar(what, 1, unit) as (bar, task):
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _bar(what: str, total: int, unit: str) -> Iterator[tuple[Progress, TaskID]]:
    columns = (
        TextColumn(f"  {what:<28}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit),
        _Speed(unit),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    with Progress(*columns, console=console) as bar:
        yield bar, bar.add_task(what, total=total)


@contextmanager
def silent() -> Iterator[None]:
    """Nothing is shown inside: for all but the first of several processes."""
    before, console.quiet = console.quiet, True
    try:
        yield
    finally:
        console.quiet = before


def show_config(yaml: str) -> None:
    """Prints a resolved configuration."""
    console.print(Syntax(yaml, "yaml", background_color="default"))


def say(text: str) -> None:
    """Prints one line."""
    console.print(text, soft_wrap=True)


def plain(text: str) -> None:
    """Prints a text as it is: what stands in brackets is no markup."""
    console.print(text, soft_wrap=True, markup=False, emoji=False)


def table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Prints a table; every column but the first is aligned to the right."""
    grid = Table(title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(columns):
        grid.add_column(name, justify="right" if i else "left")
    for row in rows:
        grid.add_row(*(str(cell) for cell in row))
    console.print(grid)


def size(num_bytes: float) -> str:
    """Bytes for people, such as 1.25 GB."""
    for unit in ("B", "kB", "MB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} GB"


def duration(seconds: float) -> str:
    """Seconds for people, such as 3 min 20 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
