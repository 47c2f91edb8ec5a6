"""Reads the runs of the ablation, and writes its table."""

from __future__ import annotations

import datetime
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tc.report.published import ABLATION
from tc.report.published import published as published_figure

TEACHER = "qwen2_5_3b"
"""The teacher of the paper's own ablation, whose text is WikiText-2."""


def published(init: str) -> float | None:
    """The perplexity that arXiv 2606.16429 gives for a row, where it is one of its own."""
    if init in ("copy_only", "zero_gate") or init.startswith("paper"):
        return published_figure(TEACHER, ABLATION, None, "-", init, "wikitext2_ppl")
    return None


@dataclass
class Result:
    """Everything that was measured.

    Attributes:
        date: of the collection; each row has its own.
        machine: what the newest runs recorded of it.
        rows: one a finished run.
    """

    date: str
    machine: dict[str, Any]
    rows: list[dict[str, Any]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def on_top_of(self, path: Path, plan: dict[str, Any]) -> Result:
        """With the rows of an earlier result that this one has not; those no longer planned go.

        Each row says when and at which commit it was measured, so the older ones can be told.
        """
        rows = {}
        for row in [*(json.loads(path.read_text())["rows"] if path.is_file() else []), *self.rows]:
            rows[row["row"], row["policy"], row["seed"]] = row
        names, policies = list(plan["rows"]), plan["policies"]
        kept = [row for key, row in rows.items() if key[0] in names]
        kept.sort(key=lambda r: (names.index(r["row"]), policies.index(r["policy"]), r["seed"]))
        return Result(self.date, self.machine, kept)


def read_run(folder: Path, name: str, policy: str) -> dict[str, Any]:
    """One run's figures."""
    metrics = json.loads((folder / "metrics.json").read_text())
    environment = json.loads((folder / "environment.json").read_text())
    config = OmegaConf.load(folder / "config.yaml")
    stages = ("calibrate", "initialise", "align", "blocks")
    seen = [stage for stage in stages if f"{stage}/seconds" in metrics]
    errors = [metrics.get(f"{stage}/relative_error") for stage in ("align", "initialise")]
    return {
        "row": name,
        "policy": policy,
        "date": datetime.date.fromtimestamp((folder / "metrics.json").stat().st_mtime).isoformat(),
        "git_commit": environment["git_commit"],
        "cpu": environment["cpu"],
        "teacher": config.teacher.name,
        "seed": config.seed,
        "perplexity": metrics["student/perplexity"],
        "perplexity_stderr": metrics["student/perplexity"] * metrics["student/nll_stderr"],
        "teacher_perplexity": metrics["teacher/perplexity"],
        "copy_only_perplexity": metrics["copy_only/perplexity"],
        "layer_error": next((error for error in errors if error is not None), None),
        "block_error": metrics.get("blocks/relative_error"),
        "calibration_tokens": metrics["calibration_tokens"] if seen[:1] == ["calibrate"] else 0,
        "seconds": sum(metrics[f"{stage}/seconds"] for stage in seen),
        "peak_rss_bytes": max([metrics[f"{stage}/peak_rss_bytes"] for stage in seen], default=None),
    }


def is_finished(folder: Path) -> bool:
    """Whether a run has come to its end, and not only to its first stage."""
    path = folder / "metrics.json"
    return path.is_file() and "student/perplexity" in json.loads(path.read_text())


def collect(output: Path, plan: dict[str, Any]) -> Result:
    """All finished runs of a plan."""
    rows, environments = [], []
    for name in plan["rows"]:
        for policy in plan["policies"]:
            folder = output / f"{name}-{policy}"
            if is_finished(folder):
                rows.append(read_run(folder, name, policy))
                environments.append(json.loads((folder / "environment.json").read_text()))
    facts = ("cpu", "cores", "memory_bytes", "python", "packages")
    machine = {key: environments[0][key] for key in facts} if environments else {}
    return Result(datetime.date.today().isoformat(), machine, rows)


def table(result: Result) -> str:
    """One table a policy, in Markdown.

    A table is of its smallest seed; a row that was not measured at it has the seed in its name. The
    published figures stand beside a teacher that was trained for long alone: a tiny one loses too
    little by copying for their ratios to say anything.
    """
    parts = []
    for policy in dict.fromkeys(row["policy"] for row in result.rows):
        rows = [row for row in result.rows if row["policy"] == policy]
        first = min(rows, key=lambda row: row["seed"])
        with_published = not first["teacher"].startswith("tiny_")
        named = {name: [row for row in rows if row["row"] == name] for name in _names(rows)}
        lines = [_cells(seeds, first["seed"]) for seeds in named.values()]
        heads = [head for head in lines[0] if with_published or "published" not in head]
        parts += [
            f"## {policy} (teacher {first['teacher_perplexity']:.2f}, seed {first['seed']})",
            "",
            f"| {' | '.join(heads)} |",
            "|---" * len(heads) + "|",
            *(f"| {' | '.join(line[head] for head in heads)} |" for line in lines),
            "",
        ]
    return "\n".join(parts)


def _names(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["row"] for row in rows))


def _over_seeds(rows: list[dict[str, Any]]) -> str:
    """Mean and standard deviation of the ratio to the teacher, where there are several seeds."""
    ratios = [row["perplexity"] / row["teacher_perplexity"] for row in rows]
    if len(ratios) < 2:
        return ""
    mean, spread = statistics.mean(ratios), statistics.stdev(ratios)
    return f"{mean:,.2f} +- {spread:,.2f} ({len(ratios)})"


def _cells(seeds: list[dict[str, Any]], common: int) -> dict[str, str]:
    """A row of the table by heading: its first seed, and the spread over all."""
    row = seeds[0]

    def number(value: float | None, form: str = ".3f") -> str:
        return "" if value is None else format(value, form)

    copied, theirs = published("copy_only"), published(row["row"])
    ratio = copied / theirs if copied and theirs else None
    peak = row["peak_rss_bytes"]
    return {
        "row": row["row"] if row["seed"] == common else f"{row['row']} (seed {row['seed']})",
        "perplexity": f"{row['perplexity']:,.1f} +- {row['perplexity_stderr']:,.1f}",
        "x teacher": number(row["perplexity"] / row["teacher_perplexity"], ",.2f"),
        "over seeds": _over_seeds(seeds),
        "copy_only / this": number(row["copy_only_perplexity"] / row["perplexity"], ",.1f"),
        "published": number(theirs, ",.0f"),
        "copy_only / published": number(ratio, ",.1f"),
        "error a layer": number(row["layer_error"]),
        "error a block": number(row["block_error"]),
        "tokens": f"{row['calibration_tokens']:,}",
        "calibrate, init, align, blocks": f"{row['seconds']:,.0f} s",
        "peak memory": "" if peak is None else f"{peak / 1e9:.1f} GB",
    }
