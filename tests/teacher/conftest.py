"""Exported GGUF files, and the embedded teacher, converted once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from teacher_helpers import EMBEDDED, gguf_header, gguf_tensors, random_cfg, write_gguf
from transformers import PreTrainedModel

from tc.config import TeacherConfig
from tc.teacher import Teacher, load_teacher

Export = Callable[..., tuple[Path, PreTrainedModel]]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Writes a random model as GGUF; keywords replace header values (None leaves one out)."""

    def run(
        architecture: str = "llama",
        model: dict[str, Any] | None = None,
        tensors: Callable[[dict[str, np.ndarray]], Any] = lambda tensors: None,
        name: str | None = None,
        **header: Any,
    ) -> tuple[Path, PreTrainedModel]:
        made = load_teacher(random_cfg(architecture, **(model or {})), tmp_path).model
        arrays = gguf_tensors(made)
        tensors(arrays)
        values = gguf_header(made) | {key.replace("__", "."): v for key, v in header.items()}
        path = write_gguf(tmp_path / "tiny.gguf", name or architecture, values, arrays)
        return path, made

    return run


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    return load_teacher(TeacherConfig(**EMBEDDED), tmp_path_factory.mktemp("cache"))
