"""The list of reported faults names tests that are there, and names them right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from composing import ROOT

LIST = ROOT / "tests" / "REPORTED.md"
ID = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


def rows(text: str) -> list[list[str]]:
    """The cells of each row below the heading."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def names_in(file: Path) -> set[str]:
    """Tests of a file, those of a class as `Class::test`."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        stem = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {f"{stem}{n.name}" for n in inside if isinstance(n, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def wrong(text: str) -> list[str]:
    """Rows that name no test, and tests that are not there."""
    problems = []
    for fault, *_, tests in rows(text):
        found = ID.findall(tests)
        problems += [] if found else [f"{fault}: no test"]
        for file, name in found:
            path = ROOT / file
            if not path.is_file() or name not in names_in(path):
                problems.append(f"{fault}: {file}::{name} is not there")
    return problems


def test_every_reported_fault_has_a_test_that_is_there() -> None:
    text = LIST.read_text()
    assert len(rows(text)) >= 35
    assert all(len(row) == 3 for row in rows(text))
    assert wrong(text) == []
    lost = text.replace("::test_beams_with", "::test_beams_wth")
    assert len(wrong(lost)) == 1  # a control: a name that is not there
    bare = text.replace("`tests/", "`")
    assert len(wrong(bare)) == len(rows(text))  # and tests that are not named as such


def test_what_is_refused_is_refused_in_these_words() -> None:
    """The message of each refusal stands in the tests that are named beside it."""
    refused = [row for row in rows(LIST.read_text()) if row[1].startswith("refused:")]
    assert len(refused) >= 3
    for _, says, tests in refused:
        words = re.findall(r'"(.+?)"', says)[0]
        sources = {ROOT / file for file, _ in ID.findall(tests)}
        # Messages are matched in part, and may be wrapped in the source.
        texts = [" ".join(re.sub(r'"\s*"', "", s.read_text()).split()) for s in sources]
        product = " ".join(re.sub(r'"\s*"', "", HYBRID.read_text()).split())
        assert any(words in text for text in [*texts, product]), words


HYBRID = ROOT / "tc" / "student" / "hybrid.py"
