"""Executes the notebooks, and writes their outputs with the hash of the source that made them.

python notebooks/execute.py            # all of them; needs the extra `dev`
python notebooks/execute.py 01_quickstart
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
SECONDS = 600
"""More than any cell takes, even on a busy machine."""


def notebooks() -> list[Path]:
    """All of them, in order."""
    return sorted(HERE.glob("*.ipynb"))


def source_hash(notebook: Any) -> str:
    """Hash of the kinds and the source of all cells; outputs do not count."""
    cells = [[cell.cell_type, cell.source] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def problems(notebook: Any) -> list[str]:
    """Why the outputs of a notebook are not those of its source, a line each."""
    found = []
    if notebook.metadata.get("tc", {}).get("source") != source_hash(notebook):
        found.append("cells were changed after they were executed")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("cells were not executed once, in order, in a fresh kernel")
    if any(output.output_type == "error" for cell in code for output in cell.outputs):
        found.append("a cell ended with an error")
    return found


def execute(path: Path) -> Any:
    """A notebook with fresh outputs; the file stays as it is."""
    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault("PYTHONPATH", str(HERE.parent))  # the package of this checkout
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": HERE}}
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, other ones at each execution
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "tc": {"source": source_hash(notebook)},
    }
    return notebook


def main() -> None:
    """Executes and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="without .ipynb; all, if none is given")
    names = parser.parse_args().names or [path.stem for path in notebooks()]
    for name in names:
        path = HERE / f"{name}.ipynb"
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
