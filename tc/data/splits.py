"""Documents dealt to disjoint parts, and the proof that they are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from tc.artifacts import hash_file, hash_of
from tc.config import DataConfig, DataKind
from tc.data.documents import PARTS, REQUIRED, Document
from tc.data.files import expand, read_files
from tc.data.hub import read_hub
from tc.data.speeches import read_speeches, speeches_folder
from tc.errors import TCError, one_message

ALWAYS_USED = {
    *("name", "kind", "min_characters"),
    *("sequence_length", "calibration_tokens", "selection_tokens"),
}
MOST_LINES = 20
"""So many problems of files are listed; a thousand files of one wrong kind need no thousand."""


@dataclass(frozen=True)
class Splits:
    """The documents of each part.

    Attributes:
        parts: documents by part, for every name of `PARTS`; `training` may be empty.
        counts: documents `read`, and of these `duplicates` and too `short`, which are left out.
    """

    parts: dict[str, list[Document]]
    counts: dict[str, int]

    def record(self) -> dict[str, Any]:
        """JSON-able: what each part holds, with the first 16 hex digits of each document's hash."""
        parts = {name: _part_record(documents) for name, documents in self.parts.items()}
        return {"counts": dict(self.counts), "parts": parts}


def _part_record(documents: list[Document]) -> dict[str, Any]:
    hashes = sorted(document.sha256 for document in documents)
    return {
        "documents": len(documents),
        "characters": sum(len(document.text) for document in documents),
        "digest": hash_of(hashes),
        "hashes": [value[:16] for value in hashes],
    }


def load_splits(cfg: DataConfig, seed: int) -> Splits:
    """Reads documents, drops duplicates and short ones, and deals the others to the four parts.

    The result follows from the documents' contents, the configuration and the seed alone.

    Args:
        cfg: what to read and which share each part gets; parts that are given by name stay so.
        seed: any integer; another seed deals otherwise.

    Raises:
        TCError: with every problem of the configuration or of the files at once; if there are too
            few documents; if one stands in two parts.
    """
    problems = config_problems(cfg)
    if problems:
        raise one_message(problems, "data cannot be read as configured:")
    splits = _named(cfg) if _by_name(cfg) else _dealt(_read(cfg), cfg, seed)
    _require_enough(splits, cfg)
    prove_disjoint(splits)
    return splits


def prove_disjoint(splits: Splits) -> None:
    """Checks by content hash that no document stands in two parts.

    Raises:
        TCError: naming the parts and the sources of each document that does.
    """
    seen: dict[str, tuple[str, Document]] = {}
    shared = []
    for name, documents in splits.parts.items():
        for document in documents:
            other, first = seen.setdefault(document.sha256, (name, document))
            if other != name:
                shared.append(f"{first.source} ({other}) and {document.source} ({name})")
    if shared:
        heading = "the same document stands in two parts; remove it from one of them:"
        raise one_message(_cut(shared), heading)


def config_problems(cfg: DataConfig) -> list[str]:
    """What is wrong with a data configuration, a line each; nothing is read for it."""
    return [*_source_problems(cfg), *_ignored(cfg), *_share_problems(cfg), *_number_problems(cfg)]


def missing_sources(cfg: DataConfig) -> list[str]:
    """What a data configuration names that is not there, a line each; names are looked at only."""
    if cfg.kind is DataKind.speeches:
        try:
            speeches_folder()
        except TCError as error:
            return [str(error)]
    if cfg.kind is not DataKind.files:
        return []
    keys = ["path"] if not _by_name(cfg) else list(PARTS)
    given = [(f"data.{key}", getattr(cfg, key)) for key in keys if getattr(cfg, key)]
    return [problem for key, patterns in given for problem in expand(patterns, key)[1]]


def sources_digest(cfg: DataConfig) -> str:
    """Hash of the contents of local sources, for the key of what is made from them.

    Of a dataset on the hub it is the name alone: what is there is known only once it is read.
    """
    if cfg.kind is DataKind.hf:
        return hash_of([cfg.dataset, cfg.subset, cfg.split])
    if cfg.kind is DataKind.speeches:
        paths = sorted(speeches_folder().rglob("*.txt"))
    else:
        keys = ("path", *PARTS)
        paths = [p for key in keys for p in expand(getattr(cfg, key) or [], f"data.{key}")[0]]
    return hash_of([[path.name, hash_file(path)] for path in paths])


def _by_name(cfg: DataConfig) -> bool:
    return any(getattr(cfg, part) is not None for part in PARTS)


def _source_problems(cfg: DataConfig) -> list[str]:
    """What the kind of data needs and lacks."""
    if cfg.kind is DataKind.hf and not cfg.dataset:
        return ["data.dataset is null; kind hf needs a hub name or a local dataset folder"]
    if cfg.kind is not DataKind.files:
        return []
    if not _by_name(cfg):
        return [] if cfg.path else ["data.path is empty; kind files needs data.path=['folder/*']"]
    lacking = [f"data.{part}" for part in REQUIRED if not getattr(cfg, part)]
    problems = ["data.path must be null where the parts are given by name"] if cfg.path else []
    if lacking:
        problems.append(f"{', '.join(lacking)} must be given too: parts by name go together")
    return problems


def _ignored(cfg: DataConfig) -> list[str]:
    """Keys that were set and would have no effect."""
    used = {
        DataKind.speeches: {"shares"},
        DataKind.files: {"path", "text_column", *(PARTS if _by_name(cfg) else ["shares"])},
        DataKind.hf: {"dataset", "subset", "split", "text_column", "max_documents", "shares"},
    }[cfg.kind] | ALWAYS_USED
    default = DataConfig()
    names = [field.name for field in fields(cfg) if field.name not in used]
    changed = [name for name in names if getattr(cfg, name) != getattr(default, name)]
    by_name = " with parts by name" if cfg.kind is DataKind.files and _by_name(cfg) else ""
    return [
        f"data.{name} has no effect for kind {cfg.kind.name}{by_name}; take it out"
        for name in changed
    ]


def _share_problems(cfg: DataConfig) -> list[str]:
    """Whether the shares are four, positive and whole together."""
    shares = cfg.shares
    if set(shares) != set(PARTS):
        return [f"data.shares has {', '.join(shares) or 'nothing'}; needed: {', '.join(PARTS)}"]
    problems = [f"data.shares.{p} is {s}; allowed is 0 to 1" for p, s in shares.items() if s < 0]
    problems += [f"data.shares.{p} is 0; it needs text" for p in REQUIRED if shares[p] == 0]
    total = sum(shares.values())
    if not abs(total - 1) < 1e-6:
        problems.append(f"data.shares add up to {total:g}; they must add up to 1")
    return problems


def _number_problems(cfg: DataConfig) -> list[str]:
    problems = []
    if cfg.max_documents is not None and cfg.max_documents < 1:
        problems.append(f"data.max_documents is {cfg.max_documents}; at least 1, or null for all")
    if cfg.min_characters < 0:
        problems.append(f"data.min_characters is {cfg.min_characters}; at least 0")
    return problems


def _read(cfg: DataConfig) -> list[Document]:
    """Every document of a source that is to be split."""
    if cfg.kind is DataKind.speeches:
        return read_speeches()
    if cfg.kind is DataKind.hf:
        return read_hub(cfg)
    return _read_parts(cfg, ["path"])["path"]


def _read_parts(cfg: DataConfig, keys: Iterable[str]) -> dict[str, list[Document]]:
    """The documents of each key's files.

    Raises:
        TCError: with the problems of all files.
    """
    documents, problems = {}, []
    for key in keys:
        patterns = getattr(cfg, key) or []
        documents[key], found = read_files(patterns, f"data.{key}", cfg.text_column)
        problems += found
    if problems:
        raise one_message(_cut(problems), "files cannot be read:")
    return documents


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"and {more} more of the kind"]


def _cleaned(documents: list[Document], cfg: DataConfig) -> tuple[list[Document], Counter[str]]:
    """Drops duplicates and short documents; the others in the order of their hashes."""
    unique: dict[str, Document] = {}
    for document in documents:
        unique.setdefault(document.sha256, document)
    least = max(1, cfg.min_characters)
    kept = [unique[key] for key in sorted(unique) if len(unique[key].text.strip()) >= least]
    duplicates, short = len(documents) - len(unique), len(unique) - len(kept)
    return kept, Counter(read=len(documents), duplicates=duplicates, short=short)


def _named(cfg: DataConfig) -> Splits:
    """The parts as the user named them; duplicates within a part are dropped."""
    counts = Counter(read=0, duplicates=0, short=0)
    parts = {}
    for part, documents in _read_parts(cfg, PARTS).items():
        parts[part], found = _cleaned(documents, cfg)
        counts.update(found)
    return Splits(parts, dict(counts))


def _dealt(documents: list[Document], cfg: DataConfig, seed: int) -> Splits:
    """Shuffles and deals documents by the shares."""
    kept, counts = _cleaned(documents, cfg)
    random.Random(f"split {seed}").shuffle(kept)
    rest = iter(kept)
    sizes = apportion(len(kept), cfg.shares)
    parts = {part: [next(rest) for _ in range(sizes[part])] for part in PARTS}
    return Splits(parts, dict(counts))


def apportion(total: int, shares: dict[str, float]) -> dict[str, int]:
    """Divides `total` documents by largest remainder, then gives empty parts one where it can be.

    Args:
        total: documents.
        shares: by part, adding up to 1. A part with a share of 0 gets none.

    Returns:
        Documents by part, adding up to `total`.
    """
    quotas = {part: total * shares[part] for part in PARTS}
    sizes = {part: int(quota + 1e-9) for part, quota in quotas.items()}
    by_remainder = sorted(
        (part for part in PARTS if shares[part] > 0), key=lambda part: sizes[part] - quotas[part]
    )
    for part in by_remainder[: total - sum(sizes.values())]:
        sizes[part] += 1
    for part in (*REQUIRED, "training"):
        # Training gives even its last document: a run can do without it, but not without others.
        donors = [p for p in PARTS if sizes[p] > (0 if p == "training" else 1) and p != part]
        if sizes[part] == 0 and shares[part] > 0 and donors:
            sizes[max(donors, key=lambda p: sizes[p])] -= 1
            sizes[part] += 1
    return sizes


def _require_enough(splits: Splits, cfg: DataConfig) -> None:
    """Refuses splits that leave a part empty which no run can do without.

    Raises:
        TCError: with the counts.
    """
    empty = [part for part in REQUIRED if not splits.parts[part]]
    if empty:
        left = sum(len(documents) for documents in splits.parts.values())
        facts = ", ".join(f"{count} {name}" for name, count in splits.counts.items())
        raise TCError(
            f"too few documents: {', '.join(empty)} would be empty. Of those given ({facts}; "
            f"short is under data.min_characters={cfg.min_characters}) {left} are left; "
            "calibration, selection and evaluation need one each. Text is never split within a "
            "document: give more documents, or lower data.min_characters."
        )
