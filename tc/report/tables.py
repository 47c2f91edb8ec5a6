"""Tables of runs, in Markdown, LaTeX and CSV: a row a configuration, mean and spread over seeds."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tc.report.frame import Group, Spread, _cell

SHORT = {
    "teacher/perplexity": "teacher",
    "copy_only/perplexity": "copy only",
    "student/perplexity_zero_shot": "zero-shot",
    "student/perplexity": "student",
    "student/perplexity_over_teacher": "student / teacher",
    "initialise/relative_error": "error, init",
    "align/relative_error": "error, align",
    "blocks/relative_error": "error, blocks",
    "total/seconds": "seconds",
}
"""What the usual measures are called in a heading; the perplexities are told by the caption."""


@dataclass
class SeedTable:
    """Groups of runs by measures.

    Attributes:
        keys: configuration keys that tell the groups apart.
        measures: columns of the frame.
        groups: the rows.
        kind: of spread, `std` or `stderr`.
    """

    keys: list[str]
    measures: list[str]
    groups: list[Group]
    kind: str = "std"

    @property
    def headings(self) -> list[str]:
        """Of all columns, for people."""
        keys = [key.removesuffix(".name") for key in self.keys] or ["runs"]
        return [*keys, "n", *(SHORT.get(name, name) for name in self.measures)]

    def heads(self, group: Group) -> list[str]:
        """What tells a group, a cell a key, and how many of its runs are done."""
        done, of = len(group.done), len(group.runs)
        keys = [_text(group.config.get(key)) for key in self.keys] or [group.label]
        return [*keys, str(done) if done == of else f"{done} of {of}"]

    def spreads(self, group: Group) -> list[Spread | None]:
        """Of each measure."""
        return [group.spread(name, self.kind) for name in self.measures]


def seed_table(groups: Sequence[Group], measures: Sequence[str], kind: str = "std") -> SeedTable:
    """The table of some groups; the keys that tell them are its first columns.

    Args:
        groups: from `tc.report.frame.groups`.
        measures: columns of the frame.
        kind: of spread, `std` (of one run) or `stderr` (of the mean).
    """
    keys = list(dict.fromkeys(key for group in groups for key in group.config))
    return SeedTable(keys, list(measures), list(groups), kind)


def markdown(table: SeedTable) -> str:
    """The table in Markdown."""
    rows = [
        [*table.heads(group), *(number(s, " ± ") for s in table.spreads(group))]
        for group in table.groups
    ]
    return markdown_table(table.headings, rows) + f"\n{_note(table.kind)}\n"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Any table in Markdown; what is no number in it cannot break it."""
    lines = [_line(headings), "|---" * len(headings) + "|", *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[Any]) -> str:
    plain = (" ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
    safe = (cell.replace("<", "&lt;").replace("[", "\\[") for cell in plain)
    return f"| {' | '.join(safe)} |"


def latex(table: SeedTable) -> str:
    r"""The table in LaTeX, for the package booktabs: `\input` it."""
    rows = [
        [*map(escape, table.heads(group)), *(_math(s) for s in table.spreads(group))]
        for group in table.groups
    ]
    heads = [escape(heading) for heading in table.headings]
    return latex_table(heads, rows, max(1, len(table.keys)), _note(table.kind))


def latex_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], left: int, note: str = ""
) -> str:
    """A booktabs table of cells that are LaTeX already.

    Args:
        headings: of the columns.
        rows: of cells.
        left: how many columns are aligned to the left.
        note: a comment above it.
    """
    lines = [f"% {note}"] if note else []
    lines += [f"\\begin{{tabular}}{{{'l' * left}{'r' * (len(headings) - left)}}}", "\\toprule"]
    lines += [f"{' & '.join(headings)} \\\\", "\\midrule"]
    lines += [f"{' & '.join(row)} \\\\" for row in rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def to_csv(table: SeedTable) -> str:
    """The table as CSV with all digits: of each measure its mean, its spread and n."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = table.keys or ["runs"]
    columns = [f"{name}{end}" for name in table.measures for end in ("", f" {table.kind}", " n")]
    writer.writerow([*keys, "done", "runs", *columns])
    for group in table.groups:
        row: list[Any] = [_text(group.config.get(key)) for key in table.keys] or [group.label]
        row += [len(group.done), len(group.runs)]
        for spread in table.spreads(group):
            row += ["", "", 0] if spread is None else [spread.mean, spread.width, spread.n]
        writer.writerow(row)
    return text.getvalue()


def number(spread: Spread | None, plus_minus: str) -> str:
    """A mean with its spread, whose first two digits say how many digits the mean has."""
    if spread is None:
        return ""
    mean, width = spread.mean, spread.width
    if width is None or not math.isfinite(width) or not math.isfinite(mean):
        return f"{mean:,.4g}" if abs(mean) < 10_000 else f"{mean:,.0f}"
    if width == 0:
        return f"{mean:,.4g}{plus_minus}0"
    decimals = min(12, max(0, 1 - math.floor(math.log10(width))))
    return f"{mean:,.{decimals}f}{plus_minus}{width:,.{decimals}f}"


def _math(spread: Spread | None) -> str:
    text = number(spread, r" \pm ").replace(",", "{,}")
    return f"${text}$" if text else ""


SPECIAL = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def escape(text: str) -> str:
    """A text as LaTeX prints it."""
    return "".join(SPECIAL.get(sign, sign) for sign in " ".join(text.split()))


def _text(value: Any) -> str:
    return "" if value is None else str(_cell(value))


def _note(kind: str) -> str:
    what = {"std": "standard deviation", "stderr": "standard error of the mean"}[kind]
    return (
        f"Mean and {what} over the seeds of n finished runs. Perplexity on held-out text; errors "
        "are relative, squared, and of a layer or block on selection tokens."
    )
