"""Artifacts: whole or not at all, and never taken for another."""

from __future__ import annotations

import enum
import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tc import artifacts
from tc.artifacts import (
    MANIFEST,
    ROOMS,
    Manifest,
    StreamedTensors,
    code_version,
    differences,
    disk_errors,
    find,
    forget_unused,
    hash_of,
    load_tensors,
    read_json,
    read_manifest,
    replacing,
    require_space,
    save_tensors,
    touch,
    write_json,
    write_text,
    writing,
)
from tc.errors import TCError


class Colour(enum.Enum):
    red = 1
    blue = 2


NATIVE = {
    "tuple": (1, 2, ("a",)),
    "enum": Colour.red,
    "path": Path("/a/b"),
    "dtype": torch.float32,
    "number": 1e-4,
    "none": None,
    "nested": {"layers": [1, (2, 3)], "kind": Colour.blue},
    "numbers": {10: "ten", 9: "nine"},
}


def made(folder: Path, made_by: dict | None = None, **info: object) -> Manifest:
    manifest = Manifest("thing", {"a": 1} if made_by is None else made_by, dict(info))
    with writing(folder, manifest) as fresh:
        save_tensors(fresh / "x.safetensors", {"x": torch.arange(12.0)})
        (fresh / "sub").mkdir()
        (fresh / "sub" / "note.txt").write_text("note")
    return manifest


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


# ---- writing -----------------------------------------------------------------------------------


def test_an_artifact_comes_back(tmp_path) -> None:
    made(tmp_path / "a" / "b", NATIVE, answer=42)
    found = find(tmp_path / "a" / "b", Manifest("thing", NATIVE))
    assert found.info == {"answer": 42}
    assert set(found.files) == {"x.safetensors", "sub/note.txt"}
    assert files(tmp_path) == {f"a/b/{name}" for name in (*found.files, MANIFEST)}
    assert torch.equal(load_tensors(tmp_path / "a/b/x.safetensors")["x"], torch.arange(12.0))


def test_no_artifact_is_none(tmp_path) -> None:
    assert find(tmp_path / "none", Manifest("thing", {})) is None
    (tmp_path / "empty").mkdir()
    assert read_manifest(tmp_path / "empty") is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        with writing(tmp_path / "a", Manifest("thing", {})) as fresh:
            (fresh / "half").write_text("half")
            raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_one(tmp_path, error: type[BaseException]) -> None:
    made(tmp_path / "a", answer=1)
    with pytest.raises(error):
        with writing(tmp_path / "a", Manifest("thing", {"a": 2})) as fresh:
            (fresh / "half").write_text("half")
            raise error
    assert find(tmp_path / "a", Manifest("thing", {"a": 1})).info == {"answer": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_new_one_takes_the_place_of_the_old(tmp_path) -> None:
    made(tmp_path / "a")
    with writing(tmp_path / "a", Manifest("thing", {"a": 2})) as fresh:
        assert (tmp_path / "a" / "x.safetensors").exists()  # until the new one is complete
        (fresh / "new").write_text("new")
    assert files(tmp_path) == {f"a/{MANIFEST}", "a/new"}


def test_a_folder_that_was_never_made_leaves_the_old_one(tmp_path) -> None:
    made(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        with replacing(tmp_path / "a"):
            pass
    assert find(tmp_path / "a", Manifest("thing", {"a": 1})) is not None
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_text_and_json_are_written_whole(tmp_path, monkeypatch) -> None:
    write_json(tmp_path / "a.json", {"x": [1, 2], "where": Path("/y")})
    assert read_json(tmp_path / "a.json") == {"x": [1, 2], "where": "/y"}
    monkeypatch.setattr(os, "fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_text(tmp_path / "a.json", "half")
    assert read_json(tmp_path / "a.json")["x"] == [1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


# ---- finding -----------------------------------------------------------------------------------


def test_a_mismatch_says_what_differs(tmp_path) -> None:
    made(tmp_path / "a", {"same": (1, 2), "seed": 1, "gone": True})
    with pytest.raises(TCError) as caught:
        find(tmp_path / "a", Manifest("thing", {"same": (1, 2), "seed": 2, "new": None}))
    lines = str(caught.value).splitlines()
    assert "another configuration or code" in lines[0] and str(tmp_path / "a") in lines[0]
    assert lines[1:] == ["  - gone: True -> absent", "  - new: absent -> None", "  - seed: 1 -> 2"]


def test_another_kind_is_a_mismatch(tmp_path) -> None:
    made(tmp_path / "a")
    with pytest.raises(TCError, match="kind: thing -> other"):
        find(tmp_path / "a", Manifest("other", {"a": 1}))


def damage(path: Path, how: str) -> str:
    """Spoils a file; returns what has to be said of it."""
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
        return "is missing"
    if how == "truncated":
        path.write_bytes(content[:-3])
        return f"has {len(content) - 3} bytes, not {len(content)}"
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return "does not have the hash"


@pytest.mark.parametrize("how", ["missing", "truncated", "one bit"])
@pytest.mark.parametrize("name", ["x.safetensors", "sub/note.txt"])
def test_a_damaged_file_is_named(tmp_path, name: str, how: str) -> None:
    wanted = made(tmp_path / "a")
    said = damage(tmp_path / "a" / name, how)
    with pytest.raises(TCError, match="damaged; delete it and run again") as caught:
        find(tmp_path / "a", wanted)
    assert f"{name} {said}" in str(caught.value) and len(str(caught.value).splitlines()) == 2


def test_every_damaged_file_is_named_at_once(tmp_path) -> None:
    wanted = made(tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "sub")
    (tmp_path / "a" / "x.safetensors").write_text("")
    with pytest.raises(TCError, match=r"(?s)sub/note\.txt.*x\.safetensors"):
        find(tmp_path / "a", wanted)


def test_a_damaged_manifest_is_named(tmp_path) -> None:
    made(tmp_path / "a")
    (tmp_path / "a" / MANIFEST).write_text('{"kind": "thi')
    with pytest.raises(TCError, match=f"{MANIFEST} is not valid JSON"):
        read_manifest(tmp_path / "a")


# ---- hashes and differences --------------------------------------------------------------------


def test_hashes_are_stable() -> None:
    assert hash_of({"a": 1, "b": [1, 2]}) == "8baa73198470c7bb"  # on every machine, for ever
    assert hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1})
    assert hash_of((1, 2)) == hash_of([1, 2])
    different = [{"a": 1}, {"a": 1.5}, {"a": "1"}, {"a": None}, {}, {"a": [1]}, {"a": True}]
    assert len({hash_of(value) for value in different}) == len(different)


def test_what_has_been_to_disk_has_the_same_key() -> None:
    back = json.loads(json.dumps(NATIVE, default=str))
    assert Manifest("thing", NATIVE).key == Manifest("thing", back).key
    assert Manifest("thing", NATIVE).key != Manifest("other", NATIVE).key


def test_equal_things_do_not_differ_for_having_been_to_disk() -> None:
    back = json.loads(json.dumps(NATIVE, default=str))
    assert differences(back, NATIVE) == []
    changed = {**NATIVE, "tuple": (1, 2, ("b",)), "enum": Colour.blue}
    assert [line.split(":")[0] for line in differences(back, changed)] == ["enum", "tuple"]


def test_absent_is_not_none() -> None:
    assert differences({}, {"a": None}) == ["a: absent -> None"]
    assert differences({"a": None}, {}) == ["a: None -> absent"]


@pytest.fixture
def source(tmp_path, monkeypatch) -> Iterator[Path]:
    """A copy of the package's source that a test may change."""
    copied = tmp_path / "tc"
    shutil.copytree(Path(artifacts.__file__).parent, copied)
    monkeypatch.setattr(artifacts, "__file__", str(copied / "artifacts.py"))
    code_version.cache_clear()
    yield copied
    code_version.cache_clear()


def versions() -> dict[str, str]:
    code_version.cache_clear()
    return {room: code_version(room) for room in ROOMS}


def test_code_version_is_of_a_room_and_of_those_below(source) -> None:
    before = versions()
    assert versions() == before and len(set(before.values())) == len(ROOMS)
    for place, first in (("artifacts.py", 0), ("teacher/load.py", 0), ("init/gate.py", 4)):
        before = versions()
        with open(source / place, "a") as file:
            file.write("# changed\n")
        changed = [room for room, version in versions().items() if version != before[room]]
        assert changed == list(ROOMS[first:])


def test_code_above_a_room_does_not_count(source) -> None:
    before = versions()
    (source / "pipeline.py").write_text("")
    (source / "evaluate" / "new.py").write_text("")
    assert {r: v for r, v in versions().items() if v != before[r]}.keys() == {"evaluate"}


def test_every_room_that_is_named_is_there() -> None:
    package = Path(artifacts.__file__).parent
    assert all(list((package / room).rglob("*.py")) for room in ROOMS)
    assert all((package / name).is_file() for name in artifacts.BELOW_ALL)


def test_unused_artifacts_are_forgotten(tmp_path) -> None:
    for name in ("old", "used", "new"):
        made(tmp_path / name)
    (tmp_path / "no artifact").mkdir()
    for name in ("old", "used"):
        os.utime(tmp_path / name / MANIFEST, (0, 0))
    touch(tmp_path / "used")
    forget_unused(tmp_path, days=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "no artifact", "used"]
    forget_unused(tmp_path / "nowhere", days=1)


# ---- a disk that refuses -----------------------------------------------------------------------


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file may grow beyond 64 KiB: the same way of failing as a full disk, for real."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    yield 65536
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_refused_write_is_one_message_and_leaves_nothing(tmp_path, small_files) -> None:
    def plain(path: Path) -> None:
        path.write_bytes(b"x" * 2 * small_files)

    def tensors(path: Path) -> None:
        save_tensors(path, {"x": torch.zeros(small_files)})

    def streamed(path: Path) -> None:
        file = StreamedTensors(path, {"x": (torch.float32, (small_files,))})
        file.append("x", torch.zeros(small_files))
        file.close()

    for write in (plain, tensors, streamed):
        with pytest.raises(TCError, match=f"cannot write {tmp_path}: the file is larger"):
            with writing(tmp_path / "a", Manifest("thing", {})) as fresh:
                write(fresh / "big")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("I/O error: Read-only file system (os error 30)"),
        PermissionError(errno.EACCES, "Permission denied"),
    ],
)
def test_what_the_disk_refuses_is_explained(tmp_path, monkeypatch, error: Exception) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(artifacts, "save_file", refuse)
    with pytest.raises(TCError, match=r"cannot write .*(space|quota|read-only|denied)") as caught:
        made(tmp_path / "a")
    assert caught.value.__cause__ is error and list(tmp_path.iterdir()) == []


def test_all_of_an_artifact_is_on_disk_before_it_takes_its_place(tmp_path, monkeypatch) -> None:
    """A loss of power must not leave a name without what it names."""
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def replaced(old: Path, new: Path) -> None:
        seen.append("replaced")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    made(tmp_path / "a")
    before, after = seen[: seen.index("replaced")], seen[seen.index("replaced") + 1 :]
    assert sorted(before) == sorted(["x.safetensors", "note.txt", MANIFEST, "a"])
    assert before[-1] == "a" and after == [tmp_path.name]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EBADF, "bad descriptor"), SafetensorError("bad header"), ValueError("x")],
)
def test_other_errors_stay_what_they_are(tmp_path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        with disk_errors(tmp_path):
            raise error
    assert caught.value is error


def test_a_folder_below_a_file_is_explained(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TCError, match="part of the path is a file"):
        made(tmp_path / "file" / "a" / "b")


def test_space_is_checked_at_the_nearest_folder_that_exists(tmp_path, monkeypatch) -> None:
    asked = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    require_space(tmp_path / "a" / "b", 1000, "thing")
    assert asked == [tmp_path]
    with pytest.raises(TCError, match=r"thing needs 2\.00 GB in .*1 kB are free"):
        require_space(tmp_path, 2 * 10**9, "thing")


# ---- tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_streamed_tensors_read_as_safetensors(tmp_path, dtype: torch.dtype) -> None:
    path = tmp_path / "x.safetensors"
    a, b = torch.randn(5, 3, 7).to(dtype), torch.randn(4, 1).to(dtype)
    layout = {"a": (dtype, (5, 3, 7)), "b": (dtype, (4, 1)), "empty": (dtype, (0, 3))}
    file = StreamedTensors(path, layout)
    file.append("b", b[:1])
    for rows in (a[:2], a[2:3]):
        file.append("a", rows)
        assert not file.is_complete
    file.append("b", b[1:])
    file.append("a", a.transpose(0, 1).contiguous().transpose(0, 1)[3:])  # not contiguous
    assert file.is_complete
    file.close()
    got = load_file(path)
    assert torch.equal(got["a"], a) and torch.equal(got["b"], b) and got["empty"].shape == (0, 3)
    assert {t.dtype for t in got.values()} == {dtype}
    save_tensors(tmp_path / "y.safetensors", {"a": a, "b": b, "empty": got["empty"]})
    ours, theirs = load_tensors(path), load_tensors(tmp_path / "y.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_more_rows_than_announced_are_refused(tmp_path) -> None:
    file = StreamedTensors(tmp_path / "x", {"a": (torch.float32, (2, 2))})
    file.append("a", torch.zeros(1, 2))
    with pytest.raises(AssertionError, match="more rows"):
        file.append("a", torch.zeros(2, 2))
    assert not file.is_complete
    file.close()


def test_an_incomplete_file_is_no_tensor_file(tmp_path) -> None:
    path = tmp_path / "x.safetensors"
    file = StreamedTensors(path, {"a": (torch.float32, (4, 2)), "b": (torch.float32, (4,))})
    file.append("a", torch.zeros(4, 2))
    file.close()
    assert not file.is_complete
    with pytest.raises(TCError, match=r"x\.safetensors cannot be read"):
        load_tensors(path)


@pytest.mark.parametrize("content", [None, b"", b"nonsense" * 40])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content: bytes | None) -> None:
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TCError, match=r"x\.safetensors cannot be read as safetensors"):
        load_tensors(path)


def test_saved_tensors_need_not_be_contiguous_or_without_gradient(tmp_path) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    save_tensors(tmp_path / "x", {"t": x.T, "part": x[1:]})
    got = load_tensors(tmp_path / "x")
    assert torch.equal(got["t"], x.T) and torch.equal(got["part"], x[1:])
