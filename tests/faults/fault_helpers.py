"""Broken inputs, made from whole ones, and what a run says of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from composing import composed
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tc.config import TeacherConfig, TeacherSource
from tc.errors import TCError
from tc.pipeline import run
from tc.teacher import load_teacher, read_geometry

MENDABLE = (TCError, HydraException, OmegaConfBaseException)
"""What `run.py` prints as one message; anything else that is raised ends in a traceback."""


@functools.cache
def base(*groups: str) -> DictConfig:
    """A composed smoke run: Hydra takes a second, so each choice of groups is composed once."""
    return composed("experiment=smoke", *groups)


def configured(folder: Path, groups: tuple[str, ...], *overrides: str) -> DictConfig:
    """A smoke run with overrides, as Hydra reads them, and all its folders inside `folder`."""
    cfg = deepcopy(base(*groups))
    places = [f"paths.cache_dir={folder}/cache", f"paths.output_dir={folder}/out"]
    for item in OverridesParser.create().parse_overrides([*places, *overrides]):
        OmegaConf.update(cfg, item.key_or_group, item.value(), force_add=item.is_add())
    return cfg


def said(call: Callable[[], Any]) -> str:
    """The one message that a call ends with.

    Fails where it ends otherwise: with another exception (a traceback, for the user), or not.
    """
    with pytest.raises(MENDABLE) as caught:
        call()
    text = str(caught.value)
    assert text.strip(), "an empty message"
    assert len(text) < 6000, "a message that nobody reads"
    return text


def said_by_run(folder: Path, *overrides: str, groups: tuple[str, ...] = ()) -> str:
    """What a run with overrides ends with."""
    return said(lambda: run(configured(folder, groups, *overrides), overrides))


def said_by_teacher(folder: Path, **fields: Any) -> str:
    """What a teacher's geometry and loading end with."""
    cfg = TeacherConfig(**{"name": "bad", "source": TeacherSource.hf, **fields})

    def load() -> None:
        read_geometry(cfg)
        load_teacher(cfg, folder / "cache")

    return said(load)


def unfinished(folder: Path) -> list[Path]:
    """What was begun below a folder and is no whole file or artifact: temporary names."""
    return [path for path in folder.rglob(".*.*") if path.suffix not in (".lock", ".holder")]


def rewrite_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes a JSON file in place; `change` alters the value, or returns another one."""
    value = json.loads(path.read_text())
    other = change(value)
    path.write_text(json.dumps(value if other is None else other))


def with_header(header: bytes, size: int | None = None, data: bytes = b"") -> bytes:
    """A safetensors file of any header, and any length that it claims to have."""
    return (len(header) if size is None else size).to_bytes(8, "little") + header + data
