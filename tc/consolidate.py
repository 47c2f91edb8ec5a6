"""`python -m tc.consolidate RUN CHECKPOINT OUTPUT`: a checkpoint of recovery becomes a student.

A checkpoint holds what is trained, and under FSDP each process' shard of it in a file of its own.
This puts the shards together and the rest of the model around them, and saves what
`AutoModelForCausalLM.from_pretrained` loads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from tc.config import Config, read_config, register, science, typed
from tc.errors import TCError
from tc.pipeline import Pipeline
from tc.run_folder import RunFolder


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; one message where it cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m tc.consolidate", description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("checkpoint", type=Path, help="RUN/recover/stage2/step_0000123")
    parser.add_argument("output", type=Path, help="the folder to make")
    given = parser.parse_args(arguments)
    try:
        consolidate(given.run, given.checkpoint, given.output)
    except TCError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"student: {given.output}")
    return 0


def consolidate(run: Path, checkpoint: Path, output: Path) -> None:
    """Makes a Hugging Face folder of a checkpoint.

    Args:
        run: the run folder that it belongs to.
        checkpoint: its folder.
        output: a folder that does not exist yet.

    Raises:
        TCError: if one of them is not what it must be.
    """
    register()
    path = run / "config.yaml"
    if not path.is_file():
        raise TCError(f"{run} is not the folder of a run: it has no config.yaml.")
    cfg = OmegaConf.merge(OmegaConf.structured(Config), read_config(path))
    assert isinstance(cfg, DictConfig)
    folder = RunFolder.of_another(run)
    Pipeline(typed(cfg), folder, science(cfg)).save_checkpoint_as_student(checkpoint, output)


if __name__ == "__main__":
    sys.exit(main())
