"""The entry point: compose a configuration, run it, print one message where it cannot be run."""

from __future__ import annotations

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from tc.config import register
from tc.errors import TCError

register()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Runs one configuration; a sweeper minimises what is returned."""
    from tc.pipeline import run

    overrides = list(HydraConfig.get().overrides.task)
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        return run(cfg, overrides)
    try:
        return run(cfg, overrides)
    except TCError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues where it was.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
