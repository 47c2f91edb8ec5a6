"""Two runs in one folder: the second is refused by name; a killed one is in nobody's way."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_helpers import configured, said, said_by_run, unfinished

from tc.artifacts import read_manifest
from tc.errors import TCError
from tc.pipeline import run
from tc.run_folder import RunFolder, alone


def forked(act: Callable[[int], Any]) -> tuple[int, int]:
    """A process that acts, and is given the writing end of a pipe; its number, the reading end."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    try:
        act(writing)
    finally:
        os._exit(0)


def stay(path: Path) -> Callable[[int], Any]:
    def act(pipe: int) -> None:
        with alone(path):
            os.write(pipe, b"in")
            signal.pause()

    return act


def test_a_second_run_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with alone(folder):
        RunFolder(folder, configured(tmp_path, ()), resume=True)
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        message = said_by_run(tmp_path, f"run_dir={folder}", "resume=false")
        assert str(folder) in message
        assert f"process {os.getpid()} on {os.uname().nodename} since" in message
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    with alone(folder):
        pass  # the control: what was refused is let in now


def test_by_another_name_it_is_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with alone(tmp_path / "real"), pytest.raises(TCError, match="in use"), alone(tmp_path / "link"):
        pass


def test_a_killed_run_is_in_nobodys_way(tmp_path: Path) -> None:
    process, reading = forked(stay(tmp_path / "run"))
    try:
        assert os.read(reading, 2) == b"in"
        with pytest.raises(TCError, match=f"process {process} on"), alone(tmp_path / "run"):
            pass
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reading)
    with alone(tmp_path / "run"):
        pass


def test_of_many_at_once_one_gets_in(tmp_path: Path) -> None:
    def act(pipe: int) -> None:
        try:
            with alone(tmp_path / "run"):
                os.write(pipe, b"i")
                signal.pause()
        except TCError:
            os.write(pipe, b"o")

    processes = [forked(act) for _ in range(8)]
    try:
        answers = [os.read(reading, 1) for _, reading in processes]
    finally:
        for process, reading in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(reading)
    assert sorted(answers) == [b"i", *[b"o"] * 7]


def test_a_helping_worker_is_let_in(tmp_path: Path) -> None:
    """Workers of a search share one folder on purpose; this one comes too early, and is told so."""
    folder = tmp_path / "run"
    options = ["policy.workers=2", "policy.worker=1", "policy.share=null", "policy.count=1"]
    options += ["policy.tokens=64", f"run_dir={folder}"]
    with alone(folder):
        message = said_by_run(tmp_path, *options, groups=("policy=ar",))
    assert "begin with policy.worker=0" in message


Place = Callable[[Path], str]


def a_file(folder: Path) -> str:
    (folder / "file").write_text("mine")
    return str(folder / "file")


def below_a_file(folder: Path) -> str:
    return a_file(folder) + "/run"


def a_full_folder(folder: Path) -> str:
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("mine")
    return str(folder / "mine")


def a_link_to_nothing(folder: Path) -> str:
    (folder / "link").symlink_to("nothing")
    return str(folder / "link")


def a_link_to_itself(folder: Path) -> str:
    (folder / "loop").symlink_to("loop")
    return str(folder / "loop")


PLACES: list[Place] = [
    *(a_file, below_a_file, a_full_folder, a_link_to_nothing, a_link_to_itself),
    *(lambda _: "/proc/run", lambda _: "/dev/null", lambda folder: f"{folder}/{'x' * 300}"),
]


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_that_cannot_be_a_runs(place: Place, tmp_path: Path) -> None:
    name = place(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert name in said_by_run(tmp_path, f"run_dir={name}")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "place",
    [a_file, below_a_file, a_link_to_itself, lambda _: "/proc/cache", lambda _: "/dev/null"],
)
def test_a_cache_that_cannot_be_one(place: Place, tmp_path: Path) -> None:
    name = place(tmp_path)
    text = tmp_path / "text"
    text.mkdir()
    for n in range(30):
        (text / f"{n}.txt").write_text(f"{n} is a number and so is {n + 1}. " * 90)
    options = [f"data.path=[{text}/*.txt]", f"paths.cache_dir={name}", f"run_dir={tmp_path}/run"]
    assert name in said_by_run(tmp_path, *options, groups=("data=files",))
    assert unfinished(tmp_path / "run") == []


DAMAGE = [b"", b"[]", b"null", b"5", b"{", b"\x80\x04\xff", b"[" * 100_000, b'{"a":' + b"9" * 5000]


@pytest.mark.parametrize("record", ["science.json", "metrics.json", "data/manifest.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_named(record: str, damage: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    cfg = configured(tmp_path, (), f"run_dir={folder}")
    RunFolder(folder, cfg, resume=True)
    path = folder / record
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(damage)
    assert str(path) in said(lambda: run(cfg))
    assert path.read_bytes() == damage


MANIFESTS: list[dict[str, Any]] = [
    {},
    {"kind": 5, "made_by": {}},
    {"kind": "data", "made_by": []},
    {"kind": "data", "made_by": {}, "files": []},
    {"kind": "data", "made_by": {}, "files": {"a": 5}},
    {"kind": "data", "made_by": {}, "files": {"a": {}}},
    {"kind": "data", "made_by": {}, "files": {"../../x": {"sha256": "", "bytes": 0}}},
    {"kind": "data", "made_by": {}, "files": {"/etc/passwd": {"sha256": "", "bytes": 0}}},
    {"kind": "data", "made_by": {}, "info": None},
    {"kind": "data", "made_by": {}, "more": 1},
]


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_manifest_that_is_none(manifest: dict[str, Any], tmp_path: Path) -> None:

    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert "manifest.json is damaged" in said(lambda: read_manifest(tmp_path))


def test_a_run_that_was_killed_at_its_first_record_is_one(tmp_path: Path) -> None:
    """Found by a kill: the temporary folder of science.json made the run folder somebody else's."""
    folder = tmp_path / "run"
    (folder / ".science.json.x1y2z3").mkdir(parents=True)
    (folder / ".science.json.x1y2z3" / "science.json").write_text("{")
    with alone(folder):
        RunFolder(folder, configured(tmp_path, ()), resume=True)
    assert unfinished(folder) == []
    assert (folder / "science.json").is_file()
