"""What a table costs: composes and checks every job of an experiment's grid, adds up the prices.

python experiments/price.py zero_shot/paper --tflops 200

Nothing is loaded or downloaded. Arithmetic is estimated as by `dry_run=true`, without benchmarks of
lm-eval; memory is the largest of a job on one device, disk the sum of all jobs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from tc.check import validate
from tc.config import Config, register, typed
from tc.errors import TCError
from tc.plan import Plan, make_plan
from tc.teacher import read_geometry

CONF = Path(__file__).resolve().parents[1] / "conf"


def jobs(experiment: str, more: list[str]) -> list[list[str]]:
    """The overrides of each job that `run.py -m experiment=... MORE` would run."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = compose("config", [f"experiment={experiment}"], return_hydra_config=True).hydra
    params = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
    axes: dict[str, list[str]] = {"experiment": [f"experiment={experiment}"]}
    for override in OverridesParser.create().parse_overrides([*params, *more]):
        key = override.get_key_element()
        values = (
            override.sweep_string_iterator()
            if override.is_sweep_override()
            else [override.get_value_element_as_str()]
        )
        axes[key] = [f"{key}={value}" for value in values]
    return [list(job) for job in itertools.product(*axes.values())]


def priced(overrides: list[list[str]]) -> Iterator[tuple[Config, Plan]]:
    """Each job as configuration and price, once it has passed the checks of a dry run."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for job in overrides:
            config = typed(compose("config", [*job, "dry_run=true"]))
            validate(config, job)
            yield config, make_plan(config, read_geometry(config.teacher))


def main() -> int:
    """Prints a line a teacher, and the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", help="such as zero_shot/paper")
    parser.add_argument("--tflops", type=float, default=200.0, help="that a GPU does in a second")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="as for run.py")
    given = parser.parse_args()
    register()
    try:
        found = list(priced(jobs(given.experiment, given.set)))
    except TCError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    names = list(dict.fromkeys(config.teacher.name for config, _ in found))
    for name in [*names, "all"]:
        plans = [plan for config, plan in found if name in (config.teacher.name, "all")]
        hours = sum(plan.flops for plan in plans) / (given.tflops * 1e12) / 3600
        peak = max(max(plan.memory_bytes, plan.recovery_bytes or 0) for plan in plans)
        disk = sum(plan.disk_bytes for plan in plans)
        print(
            f"{name}: {len(plans)} runs, {hours:,.1f} GPU hours at {given.tflops:g} TFLOP/s, "
            f"{peak / 1e9:,.0f} GB a device at most, {disk / 1e12:,.1f} TB of disk"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
