"""Datasets: a local folder stands for the hub; no test reaches the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import datasets
import pytest

from tc.config import DataConfig, DataKind
from tc.data import load_splits
from tc.data.hub import read_hub
from tc.errors import TCError


def config(folder: Path | str, **values: object) -> DataConfig:
    return DataConfig(
        **{"name": "t", "kind": DataKind.hf, "dataset": str(folder), "min_characters": 1, **values}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [json.dumps({"text": f"text number {n}", "id": n}) for n in range(20)]
    place = tmp_path / "dataset"
    place.mkdir()
    (place / "train.jsonl").write_text("\n".join(rows) + "\n")
    return place


def test_local_folder_and_max_documents(folder: Path) -> None:
    assert len(read_hub(config(folder))) == 20
    documents = read_hub(config(folder, max_documents=5))
    assert [document.text for document in documents] == [f"text number {n}" for n in range(5)]
    assert documents[3].source == f"{folder}:3"


def test_splits(folder: Path) -> None:
    splits = load_splits(config(folder, max_documents=10), seed=1)
    assert splits.counts == {"read": 10, "duplicates": 0, "short": 0}


def test_missing_column_lists_the_others(folder: Path) -> None:
    with pytest.raises(TCError, match=r"no column 'body'; there are: text, id"):
        load_splits(config(folder, text_column="body"), seed=0)


def test_column_of_another_type(folder: Path) -> None:
    with pytest.raises(TCError, match="holds a int"):
        read_hub(config(folder, text_column="id"))


def test_unknown_split_and_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TCError, match="split nothing"):
        read_hub(config(folder, split="nothing"))
    with pytest.raises(TCError, match="cannot be read"):
        read_hub(config(tmp_path / "absent"))


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise ConnectionError("Couldn't reach the Hub\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(TCError) as caught:
        read_hub(config("owner/set", subset="small"))
    message = str(caught.value)
    assert "owner/set (subset small, split train)" in message and "long story" not in message
    assert "needs a network" in message and "data=files" in message
