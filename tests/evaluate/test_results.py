"""The long table: written, read, and merged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tc.errors import TCError
from tc.evaluate import Result, merged, read_results, write_results
from tc.report import result_tables, summary_tables

HERE = {
    "teacher": [
        Result("positions", "held_out", "nll", 2.1234567890123456, 0.01, 77, 64, 3),
        Result("tasks", "arc, easy", "acc", 0.5),
    ],
    "student": [Result("generation", "one_sequence", "cache_bytes", 49152.0, context=64)],
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_results(tmp_path / "results.csv", HERE)
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert lines[0] == "model,measure,task,metric,value,stderr,samples,context,position"
    assert lines[2] == 'teacher,tasks,"arc, easy",acc,0.5,,,,'
    assert read_results(tmp_path / "results.csv") == HERE


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "model,measure,value\nteacher,tasks,much\n"])
def test_another_table_is_told_apart(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text(text)
    with pytest.raises(TCError, match="is no table of results"):
        read_results(path)


def test_a_measure_is_replaced_whole_and_others_stay() -> None:
    again = Result("tasks", "piqa", "acc", 0.75)
    table = merged(HERE, {"teacher": [again], "copy_only": [again]})
    assert table["teacher"] == [HERE["teacher"][0], again]
    assert table["student"] == HERE["student"]
    assert table["copy_only"] == [again]
    assert len(HERE["teacher"]) == 2


def test_names() -> None:
    assert HERE["teacher"][0].name == "positions/held_out/nll_by_position@64"
    assert HERE["teacher"][1].name == "tasks/arc, easy/acc"


def test_tables_set_the_student_against_the_teacher() -> None:
    def results(scale: float) -> list[Result]:
        return [
            Result("perplexity", "held_out", "perplexity", 9.0, context=64),
            Result("tasks", "arc_easy", "acc", 0.5 * scale),
            Result("tasks", "arc_easy", "acc_norm", 0.25 * scale, 0.0432 * scale),
            Result("tasks", "mmlu", "acc", 0.3 * scale),
            Result("tasks", "mmlu_law", "acc", 0.2 * scale),
            Result("corpus", "wiki", "perplexity", 10 * scale, context=2048),
            Result("corpus", "wiki", "nll", 2.3, context=2048),
            Result("generation", "one_sequence", "cache_bytes", 1000 * scale, context=1024),
        ]

    tables = result_tables({"teacher": results(1), "student": results(2)})
    assert tables == [
        (
            "tasks",
            ["", "teacher", "student", "against teacher"],
            [
                ["arc_easy acc_norm", "0.25 ± 0.043", "0.5 ± 0.086", "+0.250"],
                ["mmlu acc", "0.3", "0.6", "+0.300"],
            ],
        ),
        (
            "corpus, wiki",
            ["", "context", "teacher", "student", "against teacher"],
            [["perplexity", "2,048", "10", "20", "2.00x"]],
        ),
        (
            "generation, one_sequence",
            ["", "context", "teacher", "student", "against teacher"],
            [["cache_bytes", "1,024", "1 kB", "2 kB", "2.00x"]],
        ),
    ]
    alone = result_tables({"teacher": results(1)})
    assert alone[1][2] == [["perplexity", "2,048", "10", ""]]


def test_the_summary_tells_the_errors_that_were_measured() -> None:
    """And has no empty column where no stage was found."""
    metrics = {"data/seconds": 1.0, "data/peak_rss_bytes": 10**9, "evaluation_tokens": 100}
    metrics |= {"teacher/perplexity": 8.0, "student/perplexity": 12.0, "student/nll_stderr": 0.5}
    results = {
        "teacher": [Result("perplexity", "held_out", "perplexity", 8.0, 0.25)],
        "student": [
            Result("perplexity", "held_out", "nll", 2.4, 0.5),
            Result("perplexity", "held_out", "perplexity", 12.0, 0.75),
            Result("tasks", "lambada_openai", "perplexity", 30.0, 9.0),
        ],
    }
    stages, perplexities = summary_tables(metrics, results)
    assert stages[1] == ["stage", "wall time", "peak memory"]
    assert [len(row) for row in stages[2]] == [3]
    assert perplexities[2] == [
        ["teacher", "8.00", "0.25", "1.00"],
        ["student", "12.00", "0.75", "1.50"],
    ]
    stages, _ = summary_tables({**metrics, "data/reused": True}, results)
    assert stages[1][3] == "" and stages[2][0][3] == "found, not redone"
