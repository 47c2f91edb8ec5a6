"""Tables that set runs beside the paper's figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from composing import ROOT, composed
from omegaconf import OmegaConf

from tc.errors import TCError
from tc.evaluate import Result, write_results
from tc.report.compare import find_runs, main, make_rows, markdown, read_table

SPECS = sorted((ROOT / "experiments").glob("*/table.yaml"))
SPECS += [ROOT / "experiments/ablation/compare.yaml"]


def perplexity(value: float) -> Result:
    return Result("corpus", "wikitext2", "perplexity", value, context=2048)


def make_run(
    folder: Path, *overrides: str, student: float, teacher: float = 10.0, more: tuple = ()
) -> None:
    """A finished run, as far as a table reads it."""
    folder.mkdir(parents=True)
    cfg = composed("experiment=zero_shot/embedded", *overrides)
    OmegaConf.save(cfg, folder / "config.yaml")
    results = {"teacher": [perplexity(teacher), *more], "student": [perplexity(student), *more]}
    write_results(folder / "results.csv", results)
    (folder / "metrics.json").write_text("{}")
    (folder / "environment.json").write_text('{"git_commit": "abc", "git_dirty": false}')
    (folder / "student").mkdir()
    facts = {"num_hidden_layers": 28, "gdn": {"layers": [i for i in range(28) if i > 6]}}
    (folder / "student" / "config.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.parent.name)
def test_every_table_of_the_repository_is_valid(path: Path) -> None:
    table = read_table(path)
    assert table.lists is None or (path.parent / table.lists / "qwen2_5_3b_ar.yaml").is_file()


def test_a_ratio_is_of_multiples_of_the_own_teacher(tmp_path: Path) -> None:
    qwen = ("teacher=qwen3_8b", "policy=ratio", "policy.share=0.75")
    make_run(tmp_path / "a", *qwen, "init=paper", student=22.84, teacher=19.46)
    make_run(tmp_path / "b", *qwen, "init=paper", "seed=1", student=11.42, teacher=9.73)
    make_run(tmp_path / "c", "policy=ar", "policy.share=0.75", "init=full", student=20.0)
    make_run(tmp_path / "d", *qwen, "init=phase2", student=1.0)  # no row of this table
    table = read_table(ROOT / "experiments/zero_shot/table.yaml")
    ours, tiny = make_rows(table, find_runs([tmp_path]), tmp_path)
    # Twice the published perplexities of both models: the very same multiple.
    assert ours.values == {0: 22.84, 1: 11.42}
    assert (ours.published, ours.published_teacher) == (11.42, 9.73)
    assert ours.over_teacher == pytest.approx(11.42 / 9.73)
    assert ours.ratio == pytest.approx(1)
    # A comparison of the values themselves would not say 1.
    assert 22.84 / ours.published != pytest.approx(1, rel=0.1)
    # A teacher that the paper does not have stands beside the table's own.
    assert (tiny.beside, tiny.published) == ("qwen3_8b", 13.85)
    assert tiny.ratio == pytest.approx(2.0 / (13.85 / 9.73))
    text = markdown(table, [ours, tiny])
    assert "| qwen3_8b | 0 | 75% | ratio | paper | 17.1 +- 8.08 (2) |" in text


def test_recovery_is_told_by_its_stages(tmp_path: Path) -> None:
    common = ("teacher=qwen2_5_3b", "policy=ratio", "policy.share=0.25", "init=paper")
    make_run(tmp_path / "a", *common, "recovery=paper", student=9.0)
    short = (*common, "recovery=paper", "recovery.stage2.tokens=0")
    make_run(tmp_path / "b", *short, student=11.0)
    make_run(tmp_path / "c", *common, "recovery=quick", student=12.0)  # neither of the two
    make_run(tmp_path / "d", *common, student=13.0)
    table = read_table(ROOT / "experiments/recovery/table.yaml")
    rows = make_rows(table, find_runs([tmp_path]), tmp_path)
    assert [(row.stage, row.tokens, row.published) for row in rows] == [
        ("100M_tokens", 100_000_000, 10.83),
        ("700M_tokens", 700_000_000, 9.1194),
    ]


def test_benchmarks_and_ruler_are_found_by_the_papers_names(tmp_path: Path) -> None:
    more = (
        Result("tasks", "arc_easy", "acc", 0.5),
        Result("tasks", "arc_easy", "acc_norm", 0.6),
        Result("ruler", "niah_single_1", "string_match", 0.1, context=1024),
        Result("ruler", "niah_single_1", "string_match", 0.9, context=4096),
        Result("ruler", "niah_single_1", "string_match", 0.2, context=8192),
        Result("ruler", "niah_single_2", "string_match", 0.0, context=1024),
    )
    run = ("teacher=qwen2_5_1_5b", "policy=ratio", "policy.share=0.25", "init=full")
    make_run(tmp_path / "a", *run, "recovery=paper", student=9.0, more=more)
    ruler = make_rows(
        read_table(ROOT / "experiments/ruler/table.yaml"), find_runs([tmp_path]), tmp_path
    )
    assert [(row.metric, row.values[0]) for row in ruler] == [
        ("niah_single_1/4096", 0.9),
        ("niah_single_2/4096", 0.0),
    ]
    # A teacher that scores nothing has no multiple.
    assert ruler[1].ratio != ruler[1].ratio
    assert "nan" not in markdown(read_table(ROOT / "experiments/ruler/table.yaml"), ruler)
    tasks = make_rows(
        read_table(ROOT / "experiments/recovery/table.yaml"), find_runs([tmp_path]), tmp_path
    )
    assert {row.metric: row.values[0] for row in tasks} == {
        "wikitext2_ppl": 9.0,
        "arc_easy/acc": 0.5,
    }


def test_layers_are_compared_with_the_published_list(tmp_path: Path) -> None:
    run = ("teacher=qwen2_5_1_5b", "policy=ar", "policy.share=0.25", "init=full")
    make_run(tmp_path / "runs" / "a", *run, student=9.0)
    path = ROOT / "experiments/layer_choice/table.yaml"
    (row,) = make_rows(read_table(path), find_runs([tmp_path / "runs"]), path.parent)
    assert row.layers == list(range(7))
    assert row.in_common == 2  # of the published 0, 1, 11, 13, 21, 25 and 27
    # Another teacher's list, or none, is no comparison.
    (row,) = make_rows(read_table(path), find_runs([tmp_path / "runs"]), tmp_path)
    assert row.in_common is None


def test_the_command_writes_a_table_with_its_origin(tmp_path: Path) -> None:
    run = ("policy=ratio", "policy.share=0.5", "init=copy_only")
    make_run(tmp_path / "runs" / "a", *run, student=50.0)
    spec = str(ROOT / "experiments/zero_shot/table.yaml")
    assert main([spec, str(tmp_path / "runs"), "--output", str(tmp_path / "result")]) == 0
    found = json.loads((tmp_path / "result" / "result.json").read_text())
    assert found["git_commits"] == ["abc"]
    assert found["rows"][0]["over_teacher"] == 5.0
    assert (tmp_path / "result" / "table.md").read_text().startswith("# Students before")


def test_what_cannot_be_compared_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ROOT / "experiments/zero_shot/table.yaml"
    assert main([str(spec), str(tmp_path)]) == 1
    assert "no finished run" in capsys.readouterr().err
    run = ("policy=ratio", "policy.share=0.5", "init=phase2")
    make_run(tmp_path / "runs" / "a", *run, student=50.0)
    assert main([str(spec), str(tmp_path / "runs")]) == 1
    assert "no run has what" in capsys.readouterr().err
    other = ("policy=ratio", "policy.share=0.5", "init=full")
    make_run(tmp_path / "two" / "a", *other, student=50.0)
    make_run(tmp_path / "two" / "b", *other, "align.steps=7", student=50.0)
    assert main([str(spec), str(tmp_path / "two")]) == 1
    assert "differ in something else" in capsys.readouterr().err
    broken = tmp_path / "table.yaml"
    broken.write_text(spec.read_text().replace("wikitext2_ppl", "wikitext3"))
    with pytest.raises(TCError, match="wikitext3 is not published"):
        read_table(broken)
    broken.write_text(spec.read_text() + "colour: red\n")
    with pytest.raises(TCError, match="colour"):
        read_table(broken)
