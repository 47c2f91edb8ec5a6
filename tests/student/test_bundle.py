"""One file of several modules: what is taken, in which order, and what is refused."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tc.student.bundle import _read, bundle

PARTS = {
    "__init__": "",
    "low": '''
        """Of the lowest module."""

        from __future__ import annotations

        import os.path
        import math as m
        from math import pi, tau

        # Why it is two.
        # On two lines.
        TWO, THREE = 2, 3
        """What it says."""

        # Nobody wants this.
        UNUSED = os.path

        def area(r: float) -> float:
            return m.fabs(pi) * r**TWO
        ''',
    "high": """
        from functools import cache

        from PACKAGE.low import THREE, UNUSED, area

        @cache
        def volume(h: float) -> float:
            tau = h
            return area(1.0) * tau * THREE

        def other() -> object:
            return UNUSED
        """,
    "again": "from PACKAGE.high import volume\n\ndef twice() -> float:\n    return 2 * volume(2.0)",
    "clash": "from PACKAGE.high import volume\n\ndef area() -> float:\n    return volume(1.0)",
    "renamed": "from PACKAGE.low import area as size\n\ndef f() -> float:\n    return size(1)",
    "loop": "for i in range(3):\n    pass\n\ndef f() -> int:\n    return i",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "bundled_package"
    folder = tmp_path / name
    folder.mkdir()
    for part, text in PARTS.items():
        (folder / f"{part}.py").write_text(dedent(text).strip().replace("PACKAGE", name) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    _read.cache_clear()
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[module]


def test_what_is_needed_runs_alone(package: str) -> None:
    text = bundle([(f"{package}.again", "twice")])
    space: dict = {}
    exec(compile(text, "bundle", "exec"), space)
    assert space["twice"]() == pytest.approx(2 * 3.14159265 * 2 * 3)
    assert package not in text


def test_definitions_stand_as_they_were_and_nothing_else(package: str) -> None:
    expected = """
        from __future__ import annotations

        import math as m
        from functools import cache
        from math import pi


        # Why it is two.
        # On two lines.
        TWO, THREE = 2, 3
        \"""What it says.\"""


        def area(r: float) -> float:
            return m.fabs(pi) * r**TWO


        @cache
        def volume(h: float) -> float:
            tau = h
            return area(1.0) * tau * THREE
        """
    assert bundle([(f"{package}.high", "volume")]) == dedent(expected).lstrip()


def test_further_imports_find_their_place(package: str) -> None:
    text = bundle([(f"{package}.low", "area")], ["from torch import nn", "from math import e"])
    assert "import math as m\nfrom math import e, pi\n\nfrom torch import nn\n" in text


@pytest.mark.parametrize(
    ("root", "says"),
    [
        ("clash.area", "area means both"),
        ("renamed.f", "imports area in a way that cannot be bundled"),
        ("loop.f", "line 1: For cannot be bundled"),
    ],
)
def test_what_cannot_be_one_file_is_refused(package: str, root: str, says: str) -> None:
    module, name = root.split(".")
    with pytest.raises(ValueError, match=says):
        bundle([(f"{package}.{module}", name)])


def test_the_students_own_modules() -> None:
    text = bundle([("tc.student.hybrid", "HybridMixin")])
    tree = ast.parse(text)
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert len(names) == len(set(names))
    assert {"HybridMixin", "GatedDeltaNet", "RecurrentLayer", "gated_delta_rule"} <= set(names)
    assert not {"build_student", "cast", "mixer_state"} & set(names)
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not any(str(module).startswith("tc") for module in imported)
