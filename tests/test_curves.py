"""Where curves go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tc.config import LoggerConfig, LoggerKind
from tc.curves import make_logger


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
