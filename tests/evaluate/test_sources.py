"""What results are known by, besides model and settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tc.config import EvalConfig, Measure, TasksConfig
from tc.evaluate.sources import sources


@pytest.mark.parametrize("changed", ["tasks/task.yaml", "documents.jsonl", "base.yaml", "more.csv"])
def test_task_files_are_known_by_the_files_that_they_name(changed: str, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    documents = f"data_files: {{test: {tmp_path}/documents.jsonl}}"
    texts = {
        "tasks/task.yaml": f"include: ../base.yaml\n{documents}",
        "base.yaml": "dataset_path: json\ndata_dir: more.csv",
        "documents.jsonl": "{}",
        "more.csv": "a,b",
        "stranger.txt": "not named by any",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    cfg = EvalConfig("test", tasks=TasksConfig(include=[str(tmp_path / "tasks")]))
    before = sources(cfg, Measure.tasks)
    (tmp_path / "stranger.txt").write_text("changed")
    assert sources(cfg, Measure.tasks) == before
    (tmp_path / changed).write_text(texts[changed] + "\n\n")
    assert sources(cfg, Measure.tasks) != before
