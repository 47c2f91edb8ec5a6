"""Gathers the runs of a sweep over inits to `result.json`, and writes the table from it.

python experiments/inits/collect.py out/inits
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

HERE = Path(__file__).parent
ORDER = ("copy_only", "zero_gate", "phase1", "phase2", "full", "taylor", "paper")


def read_run(folder: Path) -> dict[str, Any]:
    """One row of the table from a finished run folder."""
    metrics = json.loads((folder / "metrics.json").read_text())
    init = OmegaConf.load(folder / "config.yaml").init.name
    stages = ("calibrate", "initialise", "align")
    return {
        "init": init,
        "calibration_tokens": metrics["calibration_tokens"] if init not in ORDER[:2] else 0,
        "relative_error": metrics.get("align/relative_error")
        or metrics.get("initialise/relative_error"),
        "perplexity": metrics["student/perplexity"],
        "perplexity_stderr": metrics["student/perplexity"] * metrics["student/nll_stderr"],
        "times_teacher": metrics["student/perplexity_over_teacher"],
        "copy_only_times": metrics["copy_only/perplexity_over_student"],
        "seconds": sum(metrics.get(f"{stage}/seconds", 0) for stage in stages),
        "peak_rss_bytes": metrics["total/peak_rss_bytes"],
        "teacher_perplexity": metrics["teacher/perplexity"],
        "evaluation_tokens": metrics["evaluation_tokens"],
    }


def collect(sweep: Path) -> dict[str, Any]:
    """All finished runs below a folder, with what they ran on."""
    folders = sorted(path.parent for path in sweep.glob("*/metrics.json"))
    rows = sorted((read_run(folder) for folder in folders), key=lambda r: ORDER.index(r["init"]))
    # A sweep is one process: the code it runs is that of its first job.
    first = min(folders, key=lambda folder: (folder / "environment.json").stat().st_mtime)
    environment = json.loads((first / "environment.json").read_text())
    facts = ("git_commit", "cpu", "cores", "memory_bytes", "python", "packages")
    return {
        "date": datetime.date.today().isoformat(),
        "environment": {key: environment[key] for key in facts},
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """The rows as a Markdown table."""
    frame = pd.DataFrame(result["rows"])
    lines = [
        "| init | calibration tokens | relative error | perplexity | x teacher | copy_only / this |"
        " calibrate, init, align |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in frame.to_dict("records"):
        error = row["relative_error"]
        cells = (
            row["init"],
            f"{row['calibration_tokens']:,}",
            "" if pd.isna(error) else f"{error:.3f}",
            f"{row['perplexity']:,.1f} +- {row['perplexity_stderr']:,.1f}",
            f"{row['times_teacher']:,.2f}",
            f"{row['copy_only_times']:,.1f}",
            f"{row['seconds']:,.0f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Reads a sweep and writes both files beside this one."""
    if len(sys.argv) != 2 or not list(Path(sys.argv[1]).glob("*/metrics.json")):
        sys.exit("usage: collect.py FOLDER, where FOLDER/*/metrics.json are finished runs")
    result = collect(Path(sys.argv[1]))
    (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    (HERE / "table.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
