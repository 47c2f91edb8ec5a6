"""Every shipped data configuration composes and says what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from tc.config import DataConfig, register
from tc.data import config_problems

CONF = Path(__file__).parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "data").glob("*.yaml"))


def composed(*overrides: str) -> DataConfig:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(overrides=list(overrides))
    config = OmegaConf.to_object(cfg.data)
    assert isinstance(config, DataConfig)
    return config


@pytest.mark.parametrize("name", NAMES)
def test_shipped_configuration(name: str) -> None:
    cfg = composed(f"+data={name}")
    assert cfg.name == name and cfg.kind.name == ("hf" if name == "fineweb_edu" else name)
    expected = ["data.path is empty; kind files needs data.path=['folder/*']"]
    assert config_problems(cfg) == (expected if name == "files" else [])


def test_paths_from_the_command_line() -> None:
    cfg = composed("+data=files", "data.path=['~/a b/**/*.txt']")
    assert cfg.path == ["~/a b/**/*.txt"] and config_problems(cfg) == []


def test_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigCompositionException):
        composed("+data=speeches", "data.pth=[x]")


@pytest.mark.parametrize("name", NAMES)
def test_first_line_says_what_it_is_for(name: str) -> None:
    first = (CONF / "data" / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ") and len(first) <= 100
