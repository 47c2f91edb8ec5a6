"""What an experiment file says of the launcher is taken, or refused; never passed over."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from composing import CONF
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig

from tc.config import register

needs_plugin = pytest.mark.skipif(
    find_spec("hydra_plugins.hydra_submitit_launcher") is None, reason="needs the extra slurm"
)


def launcher_of(folder: Path, *lines: str) -> DictConfig:
    """The launcher that `run.py experiment=own` would get, with these lines in the file."""
    file = folder / "experiment" / "own.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text("# @package _global_\n" + "\n".join(lines) + "\n")
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose(
            "config",
            [f"hydra.searchpath=[file://{folder}]", "experiment=own"],
            return_hydra_config=True,
        )
    return composed.hydra.launcher


@needs_plugin
def test_settings_of_an_experiment_reach_the_launcher(tmp_path: Path) -> None:
    chosen = ("defaults:", "  - override /hydra/launcher: submitit_slurm")
    plain = launcher_of(tmp_path, *chosen)
    assert "slurm" in plain._target_.lower() and plain.timeout_min != 77
    own = launcher_of(tmp_path, *chosen, "hydra: {launcher: {timeout_min: 77, partition: gpus}}")
    assert (own.timeout_min, own.partition) == (77, "gpus")
    assert "slurm" not in launcher_of(tmp_path)._target_.lower()  # a control: nothing was said


def test_a_setting_that_the_launcher_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigCompositionException) as error:
        launcher_of(tmp_path, "hydra: {launcher: {no_such_setting: 1}}")
    assert "no_such_setting" in str(error.value.__cause__ or error.value)
