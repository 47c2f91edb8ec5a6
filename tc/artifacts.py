"""Artifacts on disk: written whole or not at all, and read with a check.

An artifact is a folder with a `manifest.json` that names its kind, the key that made it (a hash of
configuration, code and inputs) and the SHA-256 of every file. It is written in a temporary folder
beside its place and renamed there when complete, so a reader never sees half of one.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tc.errors import TCError, one_message

MANIFEST = "manifest.json"


@dataclass
class Manifest:
    """What an artifact is and what made it.

    Attributes:
        kind: what it is, such as `calibration`.
        made_by: the flat facts whose hash is the key, kept so that a mismatch can say what differs.
        info: results that a later stage or a report reads.
        files: SHA-256 and size in bytes by file name.
    """

    kind: str
    made_by: dict[str, Any]
    info: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Hash of kind and `made_by`, 16 hexadecimal digits."""
        return hash_of({"kind": self.kind, **self.made_by})


def hash_of(value: Any) -> str:
    """Hashes a JSON-like value; equal values give equal hashes on every machine."""
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A value as it will be once it has been written as JSON and read again."""
    return json.loads(json.dumps(value, default=str))


def hash_file(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


ROOMS = (
    *("teacher", "data", "stats", "student", "init", "align"),
    *("recovery", "select", "evaluate"),
)
"""The rooms that results follow from, lowest first; a lower one never imports a higher one."""

BELOW_ALL = ("config.py", "artifacts.py", "optim.py")


@functools.cache
def code_version(room: str) -> str:
    """Hash of the source of a room and of those below it.

    It is part of every artifact's key, so that no result of other code is taken for one of ours;
    code above a room cannot change what it makes, and does not count.
    """
    root = Path(__file__).parent
    rooms = ROOMS[: ROOMS.index(room) + 1]
    paths = [root / name for name in BELOW_ALL]
    paths += [path for name in rooms for path in sorted((root / name).rglob("*.py"))]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full or read-only disk into one message that names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = _disk_reason(error)
        if reason is None:
            raise
        raise TCError(
            f"cannot write {path}: {reason}. Nothing was half-written there; "
            "free some space or choose another folder (run_dir=..., paths.cache_dir=...) "
            "and run the same command again."
        ) from error


def _disk_reason(error: Exception) -> str | None:
    """The plain reason of a write that the disk refused, or None for any other error."""
    reasons = {
        errno.ENOSPC: "no space left on the device",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "permission denied",
        errno.ENOENT: "there is no such folder, and none can be made there",
        errno.ENAMETOOLONG: "the name is too long",
        errno.ENOTDIR: "a part of the path is a file, not a folder",
        errno.EFBIG: "the file is larger than allowed",
        errno.ELOOP: "a link in the path leads to itself",
        errno.EIO: "the disk reports an input or output error",
        errno.ESTALE: "the file server no longer has this folder",
    }
    if isinstance(error, OSError):
        return reasons.get(error.errno or 0)
    # safetensors writes in Rust and keeps the errno only in its text.
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)
    return next((reasons[c] for c in codes if f"os error {c}" in str(error)), None)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary name beside `path`; what is left there takes its place, or nothing does.

    Works for a file and for a folder (make it at the given name). An existing file or folder is
    replaced only once the new one is complete.
    """
    path = Path(path)
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        holder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            fresh = holder / path.name
            yield fresh
            if not fresh.exists():
                raise FileNotFoundError(f"{fresh} was never made, so {path} is left as it was")
            if path.is_dir():
                os.replace(path, holder / "old")
            os.replace(fresh, path)
            _to_disk(path.parent)
        finally:
            shutil.rmtree(holder, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    with replacing(path) as fresh, open(fresh, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Writes JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def read_json(path: Path) -> Any:
    """Reads JSON; a damaged file is named."""
    return parse_json(path, "delete it and run again.")


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; any other JSON is damage, and named."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise TCError(f"{path} is no JSON object; delete it and run again.")
    return value


def parse_json(path: Path, remedy: str) -> Any:
    """Reads JSON.

    Args:
        path: the file.
        remedy: what to do where it is damaged, for the message.

    Raises:
        TCError: if it is not JSON, or nested deeper than any reader goes.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of which bad UTF-8 and endless numbers are two
        raise TCError(f"{path} is not valid JSON ({error}); {remedy}") from error


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a safetensors file; tensors are made contiguous and moved to the CPU."""
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads a safetensors file to the CPU.

    Raises:
        TCError: if it is missing, truncated or not safetensors.
    """
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file, of which a part can be read: `file.get_slice(name)[begin:end]`.

    Raises:
        TCError: if it is missing, truncated or not safetensors.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise TCError(
            f"{path} cannot be read as safetensors ({error}); delete it and run again."
        ) from error


@contextmanager
def writing(folder: Path, manifest: Manifest) -> Iterator[Path]:
    """Makes an artifact: yields a folder to write into, then hashes it, seals and places it."""
    with replacing(folder) as fresh:
        fresh.mkdir()
        yield fresh
        for path in sorted(p for p in fresh.rglob("*") if p.is_file()):
            path.chmod(0o666 & ~_umask())  # safetensors writes for its owner alone
            _to_disk(path)
            facts = {"sha256": hash_file(path), "bytes": path.stat().st_size}
            manifest.files[str(path.relative_to(fresh))] = facts
        text = json.dumps(asdict(manifest), indent=2, default=str) + "\n"
        (fresh / MANIFEST).write_text(text, encoding="utf-8")
        _to_disk(fresh / MANIFEST)
        _to_disk(fresh)


def _to_disk(path: Path) -> None:
    """Has what was written to a file, or the names in a folder, outlast a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of an artifact, or None where there is no such artifact."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = Manifest(**read_object(path))
        _check_manifest(manifest)
        return manifest
    except TypeError as error:
        raise TCError(f"{path} is damaged ({error}); delete {folder} and run again.") from error


def _check_manifest(manifest: Manifest) -> None:
    """Checks types, and that no file is named which lies elsewhere.

    Raises:
        TypeError: saying what is wrong.
    """
    tables = [manifest.made_by, manifest.info, manifest.files]
    if not isinstance(manifest.kind, str) or not all(isinstance(t, dict) for t in tables):
        raise TypeError("it is no manifest")
    for name, facts in manifest.files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise TypeError(f"it names {name}, which is outside")
        if not isinstance(facts, dict) or not {"sha256", "bytes"} <= set(facts):
            raise TypeError(f"it has no hash and size of {name}")


def verify(folder: Path, manifest: Manifest) -> None:
    """Checks that every file of an artifact is there with its size and hash.

    Raises:
        TCError: naming each file that is missing or damaged.
    """
    problems = []
    for name, facts in manifest.files.items():
        path = Path(folder) / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != facts["bytes"]:
            problems.append(f"{name} has {path.stat().st_size} bytes, not {facts['bytes']}")
        elif hash_file(path) != facts["sha256"]:
            problems.append(f"{name} does not have the hash that was recorded")
    if problems:
        raise one_message(problems, f"{folder} is damaged; delete it and run again:")


def find(folder: Path, wanted: Manifest) -> Manifest | None:
    """The artifact at `folder` if it is the one wanted, None if there is none.

    Raises:
        TCError: if there is one of another making (saying what differs), or a damaged one.
    """
    found = read_manifest(folder)
    if found is None:
        return None
    if found.key != wanted.key:
        raise one_message(
            differences(
                {"kind": found.kind, **found.made_by}, {"kind": wanted.kind, **wanted.made_by}
            ),
            f"{folder} was made by another configuration or code (there -> here). "
            "Take another run_dir, or resume=false to begin anew:",
        )
    verify(folder, found)
    return found


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """One line for each key whose values differ."""
    there, here = _plain(there), _plain(here)
    return [
        f"{key}: {there.get(key, 'absent')} -> {here.get(key, 'absent')}"
        for key in sorted({*there, *here})
        if key not in there or key not in here or there[key] != here[key]
    ]


class StreamedTensors:
    """A safetensors file that is written piece by piece, so that no tensor need fit in memory.

    Args:
        path: where; best inside `writing`, which places it when complete.
        layout: dtype and shape of each tensor by name.
    """

    def __init__(
        self, path: Path, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> None:
        floats = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
        names = {**floats, torch.int32: "I32"}
        header, end = {}, 0
        self._next: dict[str, int] = {}
        self._end: dict[str, int] = {}
        for name, (dtype, shape) in layout.items():
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [begin, end]}
            self._next[name], self._end[name] = begin, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors start on a multiple of eight bytes
        self._base = 8 + len(text)
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()
        self._file.write(len(text).to_bytes(8, "little") + text)

    def append(self, name: str, rows: torch.Tensor) -> None:
        """Adds rows to the end of a tensor; their dtype must be the tensor's."""
        data: Any = rows.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        assert self._next[name] + data.size <= self._end[name], f"{name}: more rows than announced"
        self._file.seek(self._base + self._next[name])
        self._file.write(data)
        self._next[name] += data.size

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @property
    def is_complete(self) -> bool:
        """Whether every tensor has all of its rows."""
        return self._next == self._end


LESS = (
    "Free some space, choose another folder (run_dir=..., paths.cache_dir=...), or take fewer "
    "tokens (data.calibration_tokens=...)."
)


def require_space(path: Path, num_bytes: int, what: str, remedy: str = LESS) -> None:
    """Checks before a long stage that the disk has room for what it will write.

    Args:
        path: where.
        num_bytes: how much.
        what: what is written, for the message.
        remedy: what to do, for the message.

    Raises:
        TCError: naming what needs how much, and how much there is.
    """
    place = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise TCError(
            f"{what} needs {_size(num_bytes)} in {path}, where {_size(free)} are free. {remedy}"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e3:.0f} kB"


def touch(folder: Path) -> None:
    """Marks a shared artifact as used now."""
    os.utime(Path(folder) / MANIFEST)


def forget_unused(parent: Path, days: float) -> None:
    """Removes the artifacts of a shared folder that no run has used for so many days.

    What a killed run left unfinished goes after a day: another run may be writing it now.
    """
    oldest = time.time() - days * 86400
    for manifest in Path(parent).glob(f"*/{MANIFEST}"):
        if not manifest.parent.name.startswith(".") and manifest.stat().st_mtime < oldest:
            shutil.rmtree(manifest.parent, ignore_errors=True)
    for unfinished in Path(parent).glob(".*.*"):
        if unfinished.stat().st_mtime < time.time() - 86400:
            shutil.rmtree(unfinished, ignore_errors=True)
