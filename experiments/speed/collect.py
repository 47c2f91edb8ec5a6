"""Gathers the measurements to `result.json`, and makes the tables and the plot from it.

python experiments/speed/collect.py out/speed
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
PARTS = ("operator", "statistics", "decoding", "recovery")
MODELS = {"teacher": "teacher", "every4": "student, every4", "none": "student, none kept"}
COLOURS = {"teacher": "#D55E00", "every4": "#0072B2", "none": "#009E73"}
MIB = 2**20

Rows = list[dict[str, Any]]


def collect(folder: Path) -> dict[str, Any]:
    """What has been measured, by part."""
    paths = {part: folder / f"{part}.json" for part in PARTS}
    return {part: json.loads(path.read_text()) for part, path in paths.items() if path.is_file()}


def markdown(title: str, head: str, rows: list[list[str]]) -> str:
    """A table below its title; `head` as Markdown has it, without the outer bars."""
    lines = [head, " | ".join(["---"] * (head.count("|") + 1)), *(" | ".join(row) for row in rows)]
    return "\n".join([f"## {title}", "", *(f"| {line} |" for line in lines), ""])


def optional(value: float | None, form: Callable[[float], str]) -> str:
    """A figure, or an empty cell."""
    return "" if value is None else form(value)


def mib(size: float) -> str:
    """Bytes as MiB."""
    return f"{size / MIB:,.1f}"


def operator_table(rows: Rows) -> str:
    """The gated delta rule."""
    head = (
        "tokens | pass | ours, ms | transformers, ms | ratio | ours, extra MiB |"
        " transformers, extra MiB | share of the core's limit"
    )
    cells = [
        [
            f"{row['tokens']:,}",
            row["pass"],
            f"{row['ours_ms']:.2f}",
            f"{row['transformers_ms']:.2f}",
            f"{row['ratio']:.2f}",
            mib(row["ours_extra_bytes"]),
            mib(row["transformers_extra_bytes"]),
            optional(row["ours_share_of_limit"], "{:.0%}".format),
        ]
        for row in rows
    ]
    return markdown("Gated delta rule", head, cells)


def statistics_table(rows: Rows) -> str:
    """The teacher's forward pass."""
    head = (
        "tokens | SDPA, s | with statistics, s | eager, s | statistics / SDPA |"
        " statistics / eager | SDPA, extra MiB | with statistics, extra MiB | eager, extra MiB |"
        " all attentions, MiB | statistics' share of these"
    )
    cells = [
        [
            f"{row['tokens']:,}",
            f"{row['plain_s']:.2f}",
            f"{row['statistics_s']:.2f}",
            optional(row["eager_s"], "{:.2f}".format),
            f"{row['statistics_over_plain']:.2f}",
            optional(row["statistics_over_eager"], "{:.2f}".format),
            mib(row["plain_extra_bytes"]),
            mib(row["statistics_extra_bytes"]),
            optional(row["eager_extra_bytes"], mib),
            mib(row["attentions_bytes"]),
            f"{row['statistics_share_of_attentions']:.2%}",
        ]
        for row in rows
    ]
    return markdown("Teacher statistics", head, cells)


def decoding_table(rows: Rows) -> str:
    """Decoding: one line a context."""
    found = {(row["context"], row["model"]): row for row in rows}
    heads = ["context"]
    heads += [f"{label}, tokens/s" for label in MODELS.values()]
    heads += [f"{label}, cache MiB" for label in MODELS.values()]
    cells = []
    for context in contexts(rows):
        models = [found[context, model] for model in MODELS]
        speeds = [f"{row['tokens_per_s']:.2f} ({row['times_teacher']:.2f}x)" for row in models]
        cells.append([f"{context:,}", *speeds, *(mib(row["cache_bytes"]) for row in models)])
    return markdown("Decoding", " | ".join(heads), cells)


def recovery_table(rows: Rows) -> str:
    """Stage 2 of recovery."""
    head = (
        "tokens | optimizer | teacher forward, s | student forward, s | teacher + 3 students, s |"
        " a step, s | share of this bound | tokens/s"
    )
    seconds = ("teacher_forward_s", "student_forward_s", "bound_s", "step_s")
    cells = [
        [
            f"{row['tokens']:,}",
            row["optimizer"],
            *(f"{row[name]:.2f}" for name in seconds),
            f"{row['share_of_bound']:.2f}",
            f"{row['tokens_per_s']:.0f}",
        ]
        for row in rows
    ]
    return markdown("Recovery, stage 2", head, cells)


def contexts(rows: Rows) -> list[int]:
    """The lengths of the contexts, ascending."""
    return sorted({row["context"] for row in rows})


def plot(rows: Rows, path: Path) -> None:
    """Tokens a second and cache against context."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    ticks = contexts(rows)
    for axis, name, unit in zip(axes, ("tokens_per_s", "cache_bytes"), (1, MIB), strict=True):
        for model, label in MODELS.items():
            values = [row[name] / unit for row in rows if row["model"] == model]
            axis.plot(ticks, values, marker="o", color=COLOURS[model], label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{n // 1024}k" for n in ticks])
        axis.minorticks_off()
        axis.set_xlabel("context, tokens")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title("decoding, tokens/s")
    axes[0].set_ylim(bottom=0)
    axes[1].set_title("cache, MiB")
    axes[1].set_yscale("log")
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=150)


TABLES = {
    "operator": operator_table,
    "statistics": statistics_table,
    "decoding": decoding_table,
    "recovery": recovery_table,
}


def main() -> None:
    """Reads the measurements and writes the files beside this one."""
    result = collect(Path(sys.argv[1])) if len(sys.argv) == 2 else {}
    if not result:
        sys.exit(f"usage: collect.py FOLDER, with any of {', '.join(f'{p}.json' for p in PARTS)}")
    tables = "\n".join(TABLES[part](measured["rows"]) for part, measured in result.items())
    (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    (HERE / "table.md").write_text(tables)
    if "decoding" in result:
        plot(result["decoding"]["rows"], HERE / "plot.png")
    print(tables)


if __name__ == "__main__":
    main()
