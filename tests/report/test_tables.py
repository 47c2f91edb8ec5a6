"""Numbers and signs of tables."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from report_helpers import write_run

from tc.report import find_runs, groups, latex, markdown, seed_table, to_csv
from tc.report.frame import Spread
from tc.report.tables import SeedTable, escape, markdown_table, number

HOSTILE = "a|b_<i>&%$#{~^\\[x](y)"


@pytest.fixture
def table(tmp_path: Path) -> SeedTable:
    for seed, perplexity in enumerate((20.0, 23.0, 21.5)):
        write_run(tmp_path / f"full-{seed}", perplexity, seed=seed)
    write_run(tmp_path / "other", 1234.5, init__name=HOSTILE)
    runs = find_runs([tmp_path]).runs
    return seed_table(groups(runs), ["student/perplexity", "total/seconds"])


@pytest.mark.parametrize(
    ("spread", "text"),
    [
        (Spread(21.5, 1.5, 3), "21.5 ± 1.5"),
        (Spread(1234.567, 12.34, 3), "1,235 ± 12"),
        (Spread(0.0123456, 0.00012, 3), "0.01235 ± 0.00012"),
        (Spread(21.5, None, 1), "21.5"),
        (Spread(33554.47, None, 1), "33,554"),
        (Spread(2.0, 0.0, 2), "2 ± 0"),
        (Spread(float("nan"), float("nan"), 2), "nan"),
        (None, ""),
    ],
)
def test_the_spread_says_how_many_digits_there_are(spread: Spread | None, text: str) -> None:
    assert number(spread, " ± ") == text


def test_markdown(table: SeedTable) -> None:
    lines = markdown(table).splitlines()
    assert lines[0] == "| init | n | student | seconds |"
    assert lines[2] == "| full | 3 | 21.5 ± 1.5 | 1.5 ± 0 |"
    # Four columns in every row, whatever stands in one.
    assert lines[3].replace("\\|", "").count("|") == 5
    assert "<i>" not in lines[3]


def test_latex(table: SeedTable) -> None:
    text = latex(table)
    assert "\\toprule\ninit & n & student & seconds \\\\\n\\midrule" in text
    assert "full & 3 & $21.5 \\pm 1.5$ & $1.5 \\pm 0$ \\\\" in text
    assert "\\bottomrule" in text
    row = text.splitlines()[6]
    assert escape(HOSTILE) in row and row.count(" & ") == 3
    assert "$1{,}234$" in row or "$1{,}235$" in row or "$1{,}234.5$" in row


def test_csv_has_all_digits(table: SeedTable) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert float(rows[0]["student/perplexity"]) == pytest.approx(64.5 / 3)
    assert float(rows[0]["student/perplexity std"]) == pytest.approx(1.5)
    assert rows[0]["student/perplexity n"] == "3"
    assert rows[1]["init.name"] == HOSTILE
    assert rows[1]["student/perplexity std"] == ""


def test_escapes() -> None:
    assert escape("a_b & 50%") == r"a\_b \& 50\%"
    assert escape("\\") == r"\textbackslash{}"
    assert markdown_table(["a"], [["x\ny|z"]]).splitlines()[2] == "| x y\\|z |"
