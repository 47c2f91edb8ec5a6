"""The notebooks' committed outputs are those of their cells, and the cells still run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(HERE))
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
execute = pytest.importorskip("execute")

ALL = pytest.mark.parametrize("path", execute.notebooks(), ids=lambda path: path.stem)


def test_there_are_three() -> None:
    assert [path.stem[:2] for path in execute.notebooks()] == ["01", "02", "03"]


@ALL
def test_outputs_belong_to_the_cells(path: Path) -> None:
    """Control: a cell that is changed afterwards is seen."""
    notebook = nbformat.read(path, as_version=4)
    assert execute.problems(notebook) == []
    assert path.stat().st_size < 500_000
    notebook.cells[1].source += "\n# changed"
    assert execute.problems(notebook) != []


@ALL
@pytest.mark.slow
def test_cells_run(path: Path) -> None:
    assert execute.problems(execute.execute(path)) == []
