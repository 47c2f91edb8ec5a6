"""Shipped configurations, composed as `run.py` composes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from tc.config import Config, register, typed

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
RANDOM_TEACHERS = sorted(path.stem for path in (CONF / "teacher").glob("random_*.yaml"))


def composed(*overrides: str) -> DictConfig:
    """The whole configuration with overrides."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def config(*overrides: str) -> Config:
    """The same as dataclasses."""
    return typed(composed(*overrides))


def group(name: str, choice: str, *overrides: str) -> Any:
    """One group's configuration alone, as its dataclass."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        tree = compose(overrides=[f"+{name}={choice}", *overrides])
    return OmegaConf.to_object(tree[name])
