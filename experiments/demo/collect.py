"""Keeps what a report reads of finished runs, without weights, text and what names a machine.

python experiments/demo/collect.py RUNS [--output experiments/demo/runs]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
WHOLE = ("science.json", "metrics.json", "results.csv", "student/config.json")
KEYS = ("data", "training text", "calibration", "student")
MANIFESTS = ("init/*/manifest.json", "align/*/manifest.json", "blocks/*/manifest.json")


def write(path: Path, value: object) -> None:
    """Writes JSON in one line, which is what git stores best of numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value) + "\n")


def collect(run: Path, output: Path) -> None:
    """Copies one run."""
    for name in WHOLE:
        target = output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run / name, target)
    environment = json.loads((run / "environment.json").read_text())
    environment.pop("platform")
    write(output / "environment.json", environment)
    artifacts = json.loads((run / "artifacts.json").read_text())
    kept = {name: artifacts[name] for name in KEYS if name in artifacts}
    for artifact in kept.values():
        artifact.pop("folder")
    write(output / "artifacts.json", kept)
    for pattern in (*MANIFESTS, "recover/*/done/manifest.json"):
        for path in run.glob(pattern):
            manifest = json.loads(path.read_text())
            own = {key: manifest[key] for key in ("kind", "info")}
            write(output / path.relative_to(run), own)


def main() -> None:
    """Copies every finished run of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--output", type=Path, default=HERE / "runs")
    given = parser.parse_args()
    found = sorted(path.parent for path in given.runs.glob("*/metrics.json"))
    if not found:
        sys.exit(f"{given.runs} has no finished runs")
    for run in found:
        collect(run, given.output / run.name)
    print(f"{len(found)} runs in {given.output}")


if __name__ == "__main__":
    main()
