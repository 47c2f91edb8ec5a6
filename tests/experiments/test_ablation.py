"""The table of the ablation: what stands in it, and what is kept of an earlier one."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from composing import ROOT

# By its path: other experiments have a collect.py as well.
CODE = runpy.run_path(str(ROOT / "experiments/ablation/collect.py"), run_name="ablation")
collect, table = CODE["collect"], CODE["table"]
PLAN = {"policies": ["none", "every4"], "rows": {"copy_only": {}, "full": {}}}


def run(output: Path, row: str, policy: str, perplexity: float, seed: int = 0) -> None:
    """The files of a finished run that the ablation reads."""
    folder = output / f"{row}-{policy}"
    folder.mkdir(parents=True)
    metrics = {
        "student/perplexity": perplexity,
        "student/nll_stderr": 0.1,
        "teacher/perplexity": 20.0 + seed,
        "copy_only/perplexity": 400.0,
        "calibration_tokens": 512,
        "calibrate/seconds": 1.0,
        "calibrate/peak_rss_bytes": 2e9,
        "align/seconds": 2.0,
        "align/peak_rss_bytes": 1e9,
    }
    machine = {"cpu": "a", "cores": 2, "memory_bytes": 1, "python": "3", "packages": {}}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "environment.json").write_text(json.dumps({"git_commit": "abc", **machine}))
    (folder / "config.yaml").write_text(f"seed: {seed}\nteacher: {{name: tiny_llama}}\n")


def lines(text: str) -> dict[str, list[str]]:
    """The cells of each row by its name."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row for row in rows}


def test_what_was_measured_before_stays_until_it_is_measured_again(tmp_path: Path) -> None:
    run(tmp_path / "first", "copy_only", "none", 300.0)
    run(tmp_path / "first", "full", "none", 30.0)
    run(tmp_path / "second", "full", "none", 25.0)
    kept = tmp_path / "result.json"
    kept.write_text(collect(tmp_path / "first", PLAN).to_json())
    result = collect(tmp_path / "second", PLAN).on_top_of(kept, PLAN)
    assert [(row["row"], row["perplexity"]) for row in result.rows] == [
        ("copy_only", 300.0),
        ("full", 25.0),
    ]
    without: dict[str, Any] = {**PLAN, "rows": {"full": {}}}
    assert [row["row"] for row in result.on_top_of(kept, without).rows] == ["full"]


def test_a_row_of_another_seed_says_so_and_seeds_have_their_spread(tmp_path: Path) -> None:
    kept = tmp_path / "result.json"
    for seed, perplexity in enumerate((30.0, 42.0)):
        run(tmp_path / str(seed), "full", "every4", perplexity, seed)
        result = collect(tmp_path / str(seed), PLAN).on_top_of(kept, PLAN)
        kept.write_text(result.to_json())
    run(tmp_path / "other", "copy_only", "every4", 400.0, 1)
    rows = lines(table(collect(tmp_path / "other", PLAN).on_top_of(kept, PLAN)))
    assert rows["full"][1:4] == ["30.0 +- 3.0", "1.50", "1.75 +- 0.35 (2)"]
    assert "copy_only" not in rows and rows["copy_only (seed 1)"][2] == "19.05"


@pytest.mark.parametrize("teacher", ["tiny_llama", "smollm2_135m"])
def test_published_figures_stand_beside_a_teacher_of_some_size(
    tmp_path: Path, teacher: str
) -> None:
    run(tmp_path, "copy_only", "none", 400.0)
    (tmp_path / "copy_only-none/config.yaml").write_text(f"seed: 0\nteacher: {{name: {teacher}}}\n")
    assert ("published" in table(collect(tmp_path, PLAN))) == (teacher == "smollm2_135m")


def test_a_run_that_has_not_ended_is_left_out(tmp_path: Path) -> None:
    run(tmp_path, "full", "none", 30.0)
    path = tmp_path / "full-none/metrics.json"
    path.write_text(json.dumps({"calibrate/seconds": 1.0}))
    assert collect(tmp_path, PLAN).rows == []
