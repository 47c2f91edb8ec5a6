"""Runs that are killed and started again equal those that nobody disturbed."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from composing import ROOT
from faults.kills import differing, plan

SCRIPTS = ROOT / "experiments" / "faults"


def rows_of(script: str, folder: Path, *args: str) -> list[dict[str, str]]:
    """The table that a script writes."""
    table = folder / "table.csv"
    subprocess.run(
        [sys.executable, str(SCRIPTS / script), *args, "--output", str(table)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    with open(table, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_every_stage_is_killed_and_nothing_comes_out_otherwise(tmp_path: Path) -> None:
    rows = rows_of("kills.py", tmp_path, "--kills", "5", "--seed", "1")
    assert [(row["killed"], row["differs"]) for row in rows] == [("True", "")] * 5


def test_a_difference_is_found() -> None:
    """The control: a tensor file of another hash, a metric that changed, a file that is gone."""
    plain = {"a.safetensors": "0" * 64, "metric x": 1.0, "results.csv": "model"}
    assert differing(plain, dict(plain)) == []
    for name in plain:
        assert differing(plain, plain | {name: "other"}) == [name]
        assert differing(plain, {k: v for k, v in plain.items() if k != name}) == [name]


def test_the_plan_hits_every_stage_at_writes_and_between_them(tmp_path: Path) -> None:
    stages = ["start", "data", "calibrate", "initialise", "align", "select"]
    stages += ["blocks", "recover", "student", "evaluate"]
    lines = [json.dumps(["before replace", stage, n]) for n, stage in enumerate(stages)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    planned = list(plan(tmp_path / "events.jsonl", 50, 0))
    assert len(planned) == 50
    assert {kill.stage for kill in planned if kill.event is not None} == set(stages)
    assert {kill.stage for kill in planned if kill.event is None} == set(stages[1:])
