"""Run folders as a frame, and the groups that differ in their seed only."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
from report_helpers import write, write_run

from tc.errors import TCError
from tc.report import find_runs, frame, groups, measures, results_frame
from tc.report.runs import Run, read_run
from tc.report.status import State

SEEDS = {0: 20.0, 1: 23.0, 2: 21.5}


def runs_at(folder: Path) -> list[Run]:
    return find_runs([folder]).runs


@pytest.fixture
def two_inits(tmp_path: Path) -> Path:
    for seed, perplexity in SEEDS.items():
        write_run(tmp_path / f"full-{seed}", perplexity, seed=seed)
        own = {"init__name": "phase1", "init__align": False}
        write_run(tmp_path / f"phase1-{seed}", perplexity + 5, seed=seed, **own)
    return tmp_path


def test_a_row_a_run_and_a_column_a_number(two_inits: Path) -> None:
    table = frame(runs_at(two_inits)).set_index("run")
    assert len(table) == 6
    assert table.loc["full-1", "student/perplexity"] == 23.0
    assert table.loc["phase1-1", "student/perplexity"] == 28.0
    assert table.loc["full-1", "config.init.name"] == "full"
    # What was measured besides is there by its own name, what has a position is not.
    assert table.loc["full-1", "student/corpus/wikitext2/perplexity@2048"] == 24.0
    assert not [name for name in table.columns if "positions" in name]
    assert list(table["status"]) == ["done"] * 6


def test_the_long_frame_has_every_row(two_inits: Path) -> None:
    long = results_frame(runs_at(two_inits))
    assert len(long) == 6 * 4
    own = long[(long.run == "full-2") & (long.position == 64)]
    assert list(own.value) == [3.0]


def test_groups_differ_in_more_than_the_seed(two_inits: Path) -> None:
    found = groups(runs_at(two_inits))
    # init.align follows from init.name here, so that it tells nothing more.
    assert [group.label for group in found] == ["init=full", "init=phase1"]
    assert [[run.seed for run in group.runs] for group in found] == [[0, 1, 2]] * 2


def test_a_key_that_the_names_do_not_settle_tells_groups_apart(two_inits: Path) -> None:
    write_run(two_inits / "other", 30.0, policy__keep=[0, 2])
    labels = [group.label for group in groups(runs_at(two_inits))]
    assert labels == [
        "init=full, policy.keep=None",
        "init=full, policy.keep=[0, 2]",
        "init=phase1, policy.keep=None",
    ]


def test_mean_and_spread_over_seeds(two_inits: Path) -> None:
    full, _ = groups(runs_at(two_inits))
    values = list(SEEDS.values())
    spread = full.spread("student/perplexity")
    assert spread is not None and spread.n == 3
    assert spread.mean == pytest.approx(statistics.mean(values))
    assert spread.width == pytest.approx(statistics.stdev(values))
    # The wrong control: the spread of a population, which divides by n.
    assert spread.width != pytest.approx(statistics.pstdev(values))
    of_mean = full.spread("student/perplexity", "stderr")
    assert of_mean is not None
    assert of_mean.width == pytest.approx(statistics.stdev(values) / 3**0.5)
    assert full.spread("no/such") is None


def test_a_run_that_is_not_finished_does_not_count(two_inits: Path) -> None:
    write(two_inits / "full-1" / "failed.json", {"stage": "align", "kind": "X", "message": "no"})
    full, _ = groups(runs_at(two_inits))
    spread = full.spread("student/perplexity")
    assert len(full.runs) == 3
    assert spread is not None and spread.n == 2
    assert spread.mean == pytest.approx((20.0 + 21.5) / 2)


def test_measures_by_name_and_pattern(two_inits: Path) -> None:
    runs = runs_at(two_inits)
    usual = measures(runs)
    assert usual[:3] == [
        "teacher/perplexity",
        "student/perplexity",
        "student/perplexity_over_teacher",
    ]
    assert "student/corpus/wikitext2/perplexity@2048" in usual
    assert measures(runs, ["*/seconds"]) == [
        f"{stage}/seconds" for stage in ("data", "student", "evaluate", "total")
    ]
    # Texts and flags are no measures.
    assert not {"student/made_by", "align/reused"} & set(measures(runs, ["*"]))
    with pytest.raises(TCError, match=r"student/perplexit: no run here .* student/perplexity"):
        measures(runs, ["student/perplexit"])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_run(tmp_path / folder / "mine")
    assert [run.name for run in runs_at(tmp_path)] == ["a/mine", "b/mine"]


def test_layers_and_moments(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "one"))
    names = [moment.name for moment in run.moments]
    assert names[:3] == ["init", "align", "stage2, 0 tokens"]
    assert run.moments[0].values["error"] == {1: 0.5, 2: 0.5, 3: 0.5}
    assert run.moments[1].values["error"] == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})
    assert run.moments[2].values == {"half_life": {1: 3.0, 2: 3.0, 3: 3.0}}
    assert run.num_layers == 4
    curves = {(curve.kind, curve.label): curve.points for curve in run.curves}
    assert curves["align", ""] == [(0, 0.5), (16, pytest.approx(0.2))]
    assert curves["perplexity", ""][0] == (0, 30.0)
    assert curves["positions", "student"] == [(0, 3.5), (64, 3.0)]


def test_the_curve_of_a_recovery_that_still_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", None)
    (run / "recover/stage2").mkdir(parents=True)
    lines = ["recover/stage2/tokens,recover/stage2/loss,step", "512,2.5,1", "1024,2.0,2", "15"]
    write(run / "curves/metrics.csv", "\n".join(lines))
    found = read_run(run)
    assert found.status.state is State.running
    curves = {curve.kind: curve.points for curve in found.curves}
    assert curves["loss"] == [(512, 2.5), (1024, 2.0)]


DAMAGE = {
    "metrics.json": ("{", "metrics.json"),
    "science.json": ("[1]", "holds no JSON object"),
    "results.csv": ("model,value\nstudent,x\n", "no table of results"),
    "init/layer_001/manifest.json": ('{"info": {"error": 1}', "manifest.json"),
    "align/layer_001/manifest.json": ('{"info": {"history": 5}}', "is damaged"),
    "recover/stage2/done/manifest.json": ('{"info": {"history": 7}}', "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_named_and_left_out(two_inits: Path, name: str) -> None:
    text, reason = DAMAGE[name]
    write(two_inits / "full-1" / name, text)
    found = find_runs([two_inits])
    assert len(found.runs) == 5
    (damaged,) = found.damaged
    assert damaged.path.name == "full-1"
    assert reason in damaged.reason


def test_values_of_a_wrong_kind_are_left_out_not_fatal(two_inits: Path) -> None:
    text = '{"info": {"error": "x", "health": {"beta": NaN, "half_life": true, "other": 1}}}'
    write(two_inits / "full-1/init/layer_001/manifest.json", text)
    run = read_run(two_inits / "full-1")
    assert 1 not in run.moments[0].values["error"] and 2 in run.moments[0].values["error"]
    assert set(run.moments[0].values["beta"]) == {2, 3}


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(TCError, match=r"here, .*there are no folders"):
        find_runs([tmp_path / "here", tmp_path / "there"])


def test_hundreds_of_runs_in_seconds(tmp_path: Path) -> None:
    for seed in range(300):
        write_run(tmp_path / f"run-{seed}", 20.0 + seed, layers=8, seed=seed)
    start = time.perf_counter()
    table = frame(runs_at(tmp_path))
    assert len(table) == 300
    assert time.perf_counter() - start < 20
