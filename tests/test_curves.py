"""Where curves go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from tc.config import SWEEP, LoggerConfig, LoggerKind
from tc.curves import Curves, log_table, make_logger


@pytest.mark.parametrize("kind", [LoggerKind.csv, LoggerKind.wandb])
def test_curves_are_csv_whatever_else_they_are(
    kind: LoggerKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    curves = make_logger(LoggerConfig(name="x", kind=kind, offline=True), tmp_path, {"seed": 0})
    curves.log_metrics({"recover/stage2/kl": 0.5}, 3)
    curves.save()
    curves.finalize("success")
    lines = (tmp_path / "curves" / "metrics.csv").read_text().splitlines()
    assert lines == ["recover/stage2/kl,step", "0.5,3"]
    found = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(found) == (kind is LoggerKind.wandb)


BLOCK = 32768


def opened(folder: Path, **settings: Any) -> Curves:
    cfg = LoggerConfig(name="x", kind=LoggerKind.wandb, offline=True)
    return make_logger(cfg, folder, settings)


def records(file: Path) -> list[Record]:
    """What `wandb sync` would send of an offline run."""
    data, at, found, whole = file.read_bytes(), 7, [], b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):  # LevelDB's log: blocks of pieces, each with a header of 7 bytes
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last piece
            found.append(Record.FromString(whole))
            whole = b""
    return found


def test_an_offline_run_has_all_that_a_later_sync_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of a sweep in one process: each its own, in one group; the first one goes on."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv(SWEEP, "init-1a2b3c4d")
    for name in ("a", "b", "a"):
        (tmp_path / name).mkdir(exist_ok=True)
        curves = opened(tmp_path / name, seed=3, name=name)
        curves.log_metrics({"align/layer": 1, "align/held_out_error": 0.5}, 10)
        log_table(curves, "stages", ["stage", "time"], [["data", "1 s"]])
        curves.finalize("success")
    files = [sorted((tmp_path / name / "wandb").glob("offline-run-*/*.wandb")) for name in "ab"]
    assert [len(found) for found in files] == [2, 1]
    runs = {}
    for file in (*files[0], *files[1]):
        found = records(file)
        (run,) = [record.run for record in found if record.HasField("run")]
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        for record in found:
            update = record.config.update if record.HasField("config") else []
            config |= {item.key: json.loads(item.value_json) for item in update}
        points: dict[str, Any] = {}
        for record in found:
            if record.HasField("history"):
                points |= {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
        assert run.run_group == "init-1a2b3c4d" and run.project == "taylor-calibrate"
        assert config["seed"] == 3
        assert points["align/held_out_error"] == 0.5 and points["trainer/global_step"] == 10
        assert points["stages/_type"] == "table-file"
        assert (file.parent / "files" / points["stages/path"]).is_file()
        assert any(record.HasField("exit") for record in found)
        runs[file] = (run.run_id, config["name"])
    assert len(set(runs.values())) == 2 and runs[files[0][0]] == runs[files[0][1]]


def test_a_run_that_goes_on_gives_no_point_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    told: list[list[tuple[int, float]]] = []
    for resumed in (False, True, False):
        curves = opened(tmp_path)
        if resumed:  # which needs a server
            curves.loggers[1].experiment._settings.resumed = True
            curves = Curves(curves.loggers, tmp_path / "curves" / "wandb_points.json")
        told.append([])

        def logs(values: dict[str, float], step: int) -> None:
            told[-1].append((step, values["align/layer"]))

        curves.loggers[1].log_metrics = logs
        for step, layer in [(1, 0), (2, 0), (1, 1)] + [(2, 1)] * (len(told) > 1):
            curves.log_metrics({"align/layer": layer, "align/held_out_error": 0.1}, step)
        curves.finalize("success")
    first = [(1, 0), (2, 0), (1, 1)]
    assert told == [first, [(2, 1)], [*first, (2, 1)]]
