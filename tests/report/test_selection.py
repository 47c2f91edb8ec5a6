"""The table, the CSV file and the picture of a search."""

from __future__ import annotations

from pathlib import Path

import pytest

from tc.config import PolicyKind
from tc.report import SELECTION_COLUMNS, selection_rows, write_selection
from tc.select import Round

PATH = [
    Round((), 4.0, {0: 3.0, 1: 2.0, 2: 3.5}),
    Round((1,), 2.0, {0: 1.5, 2: 0.5}),
]
BYPASSED = [Round((), 4.0, {0: 4.5, 1: 3.5, 2: 6.0}, sign=-1)]


def test_a_path_takes_one_layer_a_round() -> None:
    assert selection_rows(PATH, [1, 2]) == [
        [1, 0, "3.000000", "1.000000", False],
        [1, 1, "2.000000", "2.000000", True],
        [1, 2, "3.500000", "0.500000", False],
        [2, 0, "1.500000", "0.500000", False],
        [2, 2, "0.500000", "1.500000", True],
    ]


def test_single_scores_are_taken_together() -> None:
    rows = selection_rows(BYPASSED, [0, 2])
    assert [row[3:] for row in rows] == [
        ["0.500000", True],
        ["-0.500000", False],
        ["2.000000", True],
    ]


@pytest.mark.parametrize(
    ("kind", "rounds", "lines"),
    [
        (PolicyKind.ar, BYPASSED, ["| 2 | 6.0000 | 2.0000 | yes |", "| 0 | 4.5000 | 0.5000 |  |"]),
        (
            PolicyKind.greedy,
            PATH,
            [
                "| 1 | 1 | 2.0000 | 2.0000 | 0 (1.0000) |",
                "| 2 | 2 | 0.5000 | 1.5000 | 0 (0.5000) |",
            ],
        ),
    ],
)
def test_the_files_of_a_search(
    kind: PolicyKind, rounds: list[Round], lines: list[str], tmp_path: Path
) -> None:
    write_selection(tmp_path, kind, rounds, [1, 2])
    table = (tmp_path / "table.md").read_text().splitlines()
    assert table[0].startswith("Kept: 1, 2.") and "4.0000 to begin with" in table[0]
    places = [table.index(line) for line in lines]
    assert places == sorted(places)
    rows = (tmp_path / "scores.csv").read_text().splitlines()
    assert rows[0] == ",".join(SELECTION_COLUMNS)
    assert len(rows) == 1 + sum(len(found.losses) for found in rounds)
    assert (tmp_path / "scores.png").read_bytes()[:4] == b"\x89PNG"


def test_a_path_through_all_layers_can_be_drawn(tmp_path: Path) -> None:
    """Nothing is left to choose in its last round, and nothing to gain."""
    rounds = [Round((), 1.0, {0: 0.0, 1: 0.5}), Round((0,), 0.0, {1: 0.0})]
    write_selection(tmp_path, PolicyKind.greedy, rounds, [0, 1])
    assert "| 2 | 1 | 0.0000 | 0.0000 |  |" in (tmp_path / "table.md").read_text()
