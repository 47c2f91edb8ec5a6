"""Runs every row of rows.yaml under its policies, then makes the table.

python experiments/ablation/run.py [--rows full paper] [--policies every4] [key=value ...]

Finished runs are found and not redone. `key=value` goes to every run, such as seed=1.
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
    """One run, unless it is finished."""
    folder = output / f"{name}-{policy}"
    if (folder / "metrics.json").is_file():
        return
    print(f"== {name}, {policy}", flush=True)
    command = [sys.executable, "run.py", f"run_dir={folder}", f"policy={policy}"]
    command += [*row["overrides"], *more]
    # A run takes a folder for its own when it is empty: first its tokens, then the links.
    subprocess.run([*command, "stages=[data]"], cwd=ROOT, check=True)
    for source in sorted(output.glob(f"{row.get('layers_of', name)}-*")):
        share_layers(source, folder)
    subprocess.run(command, cwd=ROOT, check=True)


def main() -> None:
    """Runs what is asked for, and writes result.json and table.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    plan: Any = OmegaConf.to_container(OmegaConf.load(HERE / "rows.yaml"))
    parser.add_argument("--output", type=Path, default=Path("out/ablation"))
    parser.add_argument("--result", type=Path, default=HERE, help="where the table goes")
    parser.add_argument("--rows", nargs="+", choices=list(plan["rows"]), default=list(plan["rows"]))
    parser.add_argument("--policies", nargs="+", choices=plan["policies"], default=plan["policies"])
    parser.add_argument("more", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    output = arguments.output.resolve()
    arguments.result.mkdir(parents=True, exist_ok=True)
    for name in arguments.rows:
        row = plan["rows"][name]
        for policy in row.get("policies", plan["policies"]):
            if policy in arguments.policies:
                run(output, name, row, policy, arguments.more)
    result = collect(output, plan)
    (arguments.result / "result.json").write_text(result.to_json())
    (arguments.result / "table.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
