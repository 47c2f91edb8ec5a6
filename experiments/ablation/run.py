"""Runs every row of rows.yaml under its policies, then makes the table.

python experiments/ablation/run.py [--rows full paper] [--policies every4] [--set seed=1 ...]

What is finished is found and not redone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from collect import collect, table
from omegaconf import OmegaConf

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def share_layers(source: Path, folder: Path) -> None:
    """Gives a run the mixers that another run of its row has made, as links.

    Layers do not depend on the policy (blocks do). The pipeline checks key and hash of each.
    """
    for stage in ("init", "align"):
        for layer in sorted((source / stage).glob("layer_*")):
            if not (folder / stage / layer.name).exists():
                shutil.copytree(layer, folder / stage / layer.name, copy_function=os.link)


def run(output: Path, name: str, row: dict[str, Any], policy: str, more: list[str]) -> None:
    """One run; the pipeline redoes nothing of it that is finished, and refuses what is changed."""
    folder = output / f"{name}-{policy}"
    print(f"== {name}, {policy}", flush=True)
    command = [sys.executable, "run.py", f"run_dir={folder}", f"policy={policy}"]
    command += ["recovery=none", *row["overrides"], *more]
    # A run takes a folder for its own when it is empty: first its tokens, then the links.
    start([*command, "stages=[data]"])
    for source in sorted(output.glob(f"{row.get('layers_of', name)}-*")):
        if source != folder:
            share_layers(source, folder)
    start(command)


def start(command: list[str]) -> None:
    """Runs a command, which says itself what is wrong."""
    status = subprocess.run(command, cwd=ROOT).returncode
    if status:
        sys.exit(f"stopped: {' '.join(command[1:])} ended with status {status}")


def main() -> None:
    """Runs what is asked for, and writes result.json and table.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    plan: Any = OmegaConf.to_container(OmegaConf.load(HERE / "rows.yaml"))
    parser.add_argument("--output", type=Path, default=Path("out/ablation"))
    parser.add_argument(
        "--result",
        type=Path,
        help="where the table goes, on top of the one there; else to the output",
    )
    parser.add_argument("--rows", nargs="+", choices=list(plan["rows"]), default=list(plan["rows"]))
    parser.add_argument("--policies", nargs="+", choices=plan["policies"], default=plan["policies"])
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="of every run")
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    for name in arguments.rows:
        row = plan["rows"][name]
        for policy in row.get("policies", plan["policies"]):
            if policy in arguments.policies:
                run(output, name, row, policy, arguments.set)
    result = collect(output, plan)
    if given := arguments.result:
        result = result.on_top_of(given / "result.json", plan)
    if not result.rows:
        sys.exit(f"{output} has no finished run of rows.yaml, and these options name none to make")
    folder = arguments.result or output
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(result.to_json())
    (folder / "table.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
