"""The entry point: compose a configuration and run it; one message where that cannot be done."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, is_dataclass

# Before torch is imported. GNU OpenMP's threads wait for each other in a busy loop; where another
# program wants a core, small operations then take a hundred times as long. A short wait costs
# nothing on a quiet machine (measured: 46 against 44 ms, and 0.12 against 5.8 s on a busy one).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from tc.config import SWEEP, register, sweep_name
from tc.errors import TCError
from tc.signals import STATUS, Interrupted, interrupt_once, listen

register()

WANTED = "TC_FULL_ERROR"
"""HYDRA_FULL_ERROR as the user set it, before it is set for Hydra."""


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Runs one configuration; a sweeper minimises what is returned."""
    from tc.pipeline import run

    try:
        return run(cfg, list(HydraConfig.get().overrides.task))
    except TCError as error:
        # Here and not below, so that each failed job of a sweep says why.
        print(f"\nerror: {error}\n", file=sys.stderr)
        error.told = True
        if HydraConfig.get().mode is RunMode.RUN and not wants_traceback():
            sys.exit(1)  # not an error to Hydra, which would add a line of its own
        raise


def reasons(error: BaseException) -> list[str]:
    """What lies behind a refused override: Hydra names the override, its cause the value or key."""
    cause = error.__cause__
    if cause is None:
        return []
    schema = getattr(cause, "object_type", None)
    allowed = [field.name for field in fields(schema)] if is_dataclass(schema) else []
    lines = [f"  {str(cause).splitlines()[0]}"]
    if allowed and "not in" in lines[0]:
        lines.append(f"  allowed: {', '.join(allowed)}")
    return lines + reasons(cause)


def group_of(words: list[str]) -> str:
    """What the runs of a sweep share: the keys that are swept, and a name of the whole command."""
    swept = [word.split("=")[0].lstrip("+") for word in words if "=" in word and "," in word]
    return "-".join([*swept, sweep_name(words)])


def wants_traceback() -> bool:
    """Whether the user has asked for tracebacks."""
    return os.environ.get(WANTED) == "1"


def run_main() -> int:
    """Runs `main`; tracebacks of what the user can mend are shown under HYDRA_FULL_ERROR=1 only."""
    listen(interrupt_once)
    if {"-m", "--multirun"} & set(sys.argv):
        os.environ.setdefault(SWEEP, group_of(sys.argv[1:]))
    os.environ.setdefault(WANTED, os.environ.get("HYDRA_FULL_ERROR", "0"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints and exits before we see the error
    try:
        main()
    except (TCError, HydraException, OmegaConfBaseException) as error:
        if wants_traceback():
            raise
        if isinstance(error, TCError) and not error.told:
            print(f"\nerror: {error}", file=sys.stderr)
        if not isinstance(error, TCError):
            print("\n".join(["error: " + str(error), *reasons(error)]), file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        told = stop if isinstance(stop, Interrupted) else Interrupted(0)
        print(f"\n{told}", file=sys.stderr)
        return STATUS
    return 0


if __name__ == "__main__":
    sys.exit(run_main())
