"""The page's text: its data, what a hostile folder can put there, and the command that makes it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_helpers import write, write_run, write_sweep

from tc.report.__main__ import main
from tc.report.page import as_json

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028[/]"


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def test_json_cannot_end_the_element_that_it_stands_in() -> None:
    text = as_json({"name": HOSTILE, "value": float("nan"), "list": [float("inf"), 1.23456789]})
    assert not set("<>&\u2028") & set(text)
    assert "<" in json.dumps({"name": HOSTILE})  # the plain way, which would
    assert json.loads(text) == {"name": HOSTILE, "value": None, "list": [None, 1.23457]}


def test_hostile_names_stay_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "<img onerror=alert(3)>", 20.0, init__name=HOSTILE)
    write_run(runs / "b", None)
    write(runs / "b" / "failed.json", {"stage": HOSTILE, "kind": "x", "message": HOSTILE})
    write_sweep(runs, [(runs / "b", [f"init={HOSTILE}"])])
    assert main([str(runs), "--output", str(tmp_path / "out"), "--title", HOSTILE]) == 0
    page = tmp_path / "out" / "report.html"
    text = page.read_text(encoding="utf-8")
    assert "alert(1)</script>" not in text and "<img" not in text
    assert text.count("<script") == text.count("</script>") == 2
    data = data_of(page)
    assert data["title"] == HOSTILE
    failed = next(run for run in data["runs"] if run["state"] == "failed")
    assert failed["why"] == HOSTILE


def test_only_the_pages_own_program_may_run(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    assert main([str(tmp_path / "runs"), "--output", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    program = re.findall(r"<script>(.*?)</script>", text, re.S)[-1]
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "default-src 'none'" in text
    assert "innerHTML" not in program
    assert not re.search(r"(src|href)=\"?https?:", text)


def test_numbers_reach_the_page(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed, perplexity in enumerate((20.0, 23.0)):
        write_run(runs / f"a{seed}", perplexity, seed=seed)
    write_run(runs / "broken")
    write(runs / "broken" / "metrics.json", "{")
    assert main([str(runs), "--output", str(tmp_path / "out"), "--metric", "student/perp*"]) == 0
    data = data_of(tmp_path / "out" / "report.html")
    names = [measure["name"] for measure in data["measures"]]
    (group,) = data["groups"]
    assert group["cells"][names.index("student/perplexity")]["value"] == 21.5
    assert data["differing"] == ["seed"]
    assert data["runs"][1]["values"][names.index("student/perplexity")] == 23.0
    (damaged,) = data["damaged"]
    assert damaged["path"].endswith("broken")
    chart = next(chart for chart in data["charts"] if chart["kind"] == "perplexity")
    assert chart["lines"][0]["points"][0] == [0, 30.0]
    first = data["heat"]["rows"][0]
    assert first["values"]["half_life"] == [None, 2.0, 4.0, 6.0]
    assert data["provenance"]["rows"][0][1] == "a" * 12


def test_the_page_of_many_runs_is_small(tmp_path: Path) -> None:
    for seed in range(200):
        write_run(tmp_path / "runs" / f"r{seed}", 20.0 + seed, layers=32, points=400, seed=seed)
    assert main([str(tmp_path / "runs"), "--output", str(tmp_path / "out")]) == 0
    page = tmp_path / "out" / "report.html"
    assert page.stat().st_size < 3_000_000
    chart = next(chart for chart in data_of(page)["charts"] if chart["kind"] == "loss")
    assert {len(line["points"]) for line in chart["lines"]} == {120}
    # Thinned, not cut: the last point is the curve's own.
    assert chart["lines"][0]["points"][-1][0] == 512 * 399


def test_every_format_is_written(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a$b$c")
    out = tmp_path / "out"
    formats = "html,md,latex,csv,png,svg"
    assert main([str(tmp_path / "runs"), "--output", str(out), "--format", formats]) == 0
    found = {path.name for path in out.iterdir()}
    assert {"report.html", "table.md", "table.tex", "table.csv", "runs.csv"} < found
    assert (out / "curve_loss.png").read_bytes().startswith(b"\x89PNG")
    assert "training tokens" in (out / "curve_loss.svg").read_text()


def test_committed_results_of_experiments(tmp_path: Path) -> None:
    rows = [{"init": "full", "perplexity": 40.5}, {"init": "paper", "other": [1]}]
    write(tmp_path / "in" / "ablation" / "result.json", {"date": "2026-11-30", "rows": rows})
    points = [{"tokens": 0, "perplexity_over_teacher": 2.0}, {"tokens": 512, "loss": 1.0}]
    write(tmp_path / "in" / "targets" / "curves.json", {"full": {"0": points}})
    write(tmp_path / "in" / "broken" / "result.json", {"rows": 3})
    assert main([str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 0
    data = data_of(tmp_path / "out" / "report.html")
    (table,) = data["recorded"]
    assert table["headings"] == ["init", "perplexity", "other"]
    assert table["rows"] == [["full", 40.5, None], ["paper", None, "[1]"]]
    (chart,) = data["charts"]
    assert chart["lines"][0]["points"] == [[0, 2.0]]
    assert len(data["damaged"]) == 1


BAD = {
    "no such folder": (["{}/none"], "none is no folder"),
    "no runs": (["{}/empty"], "no runs in"),
    "format": (["{}/runs", "--format", "pdf"], "--format pdf: a list of html"),
    "metric": (["{}/runs", "--metric", "nonsense"], "--metric nonsense: no run here"),
    "a file": (["{}/runs", "--output", "{}/file"], "is a file; give a folder"),
    "only damaged": (["{}/damaged"], "can be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_one_message_and_nothing_written(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "runs" / "a")
    write(tmp_path / "damaged" / "science.json", "{")
    write(tmp_path / "file", "text")
    arguments, message = BAD[case]
    words = [word.format(tmp_path) for word in arguments]
    out = tmp_path / "out"
    if "--output" not in words:
        words += ["--output", str(out)]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert not out.exists()
