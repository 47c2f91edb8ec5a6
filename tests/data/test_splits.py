"""Dealing documents to parts, and the proof that parts are disjoint."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tc.config import DataConfig, DataKind
from tc.data import PARTS, Document, Splits, config_problems, load_splits, prove_disjoint
from tc.data.splits import MOST_LINES, apportion
from tc.errors import TCError

Make = Callable[..., DataConfig]
SHARES = DataConfig().shares


def write(folder: Path, texts: list[str], prefix: str = "f") -> str:
    folder.mkdir(exist_ok=True)
    for n, text in enumerate(texts):
        (folder / f"{prefix}{n:03}.txt").write_text(text)
    return f"{folder}/*.txt"


def hashes(splits: Splits) -> dict[str, list[str]]:
    return {part: [document.sha256 for document in splits.parts[part]] for part in PARTS}


def test_hash_ignores_white_space_only() -> None:
    assert Document("a  b\n\nc ", "x").sha256 == Document("a b c", "y").sha256
    assert Document("a b c", "x").sha256 != Document("a b C", "x").sha256


def test_every_document_is_in_one_part(tmp_path: Path, files_config: Make) -> None:
    texts = [f"document {n}" for n in range(40)]
    splits = load_splits(files_config(path=[write(tmp_path / "d", texts)]), seed=0)
    assert sorted(d.text for part in splits.parts.values() for d in part) == sorted(texts)
    sizes = {part: len(documents) for part, documents in splits.parts.items()}
    assert sizes == {"calibration": 6, "training": 24, "selection": 4, "evaluation": 6}


def test_same_seed_same_splits_whatever_the_names(tmp_path: Path, files_config: Make) -> None:
    texts = [f"document {n}" for n in range(30)]
    first = write(tmp_path / "a", texts)
    random.Random(5).shuffle(texts)
    second = write(tmp_path / "b", texts, prefix="other")
    one = load_splits(files_config(path=[first]), seed=3)
    assert hashes(one) == hashes(load_splits(files_config(path=[second]), seed=3))
    assert one.record() == load_splits(files_config(path=[second]), seed=3).record()
    assert hashes(one) != hashes(load_splits(files_config(path=[first]), seed=4))


def test_file_system_order_does_not_matter(
    tmp_path: Path, files_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of two equal texts the first by name is kept, whatever order the system lists files in.
    path = write(tmp_path / "d", [f"document {n % 9}" for n in range(20)])
    one = load_splits(files_config(path=[path]), seed=0)
    scan = os.scandir

    class Reversed:
        def __init__(self, place: str) -> None:
            self.entries = list(scan(place))[::-1]

        def __enter__(self) -> Reversed:
            return self

        def __exit__(self, *error: object) -> None: ...

        def __iter__(self) -> object:
            return iter(self.entries)

    monkeypatch.setattr(os, "scandir", Reversed)
    assert load_splits(files_config(path=[path]), seed=0).parts == one.parts


def test_duplicates_and_short_ones_are_counted(tmp_path: Path, files_config: Make) -> None:
    texts = [*(f"long document {n}" for n in range(8)), "long  document\n3", "tiny", "", " \n"]
    cfg = files_config(path=[write(tmp_path / "d", texts)], min_characters=10)
    splits = load_splits(cfg, seed=0)
    # The blank ones are each other's duplicates, and short.
    assert splits.counts == {"read": 12, "duplicates": 2, "short": 2}
    assert sum(map(len, splits.parts.values())) == 8


def test_too_few_documents(tmp_path: Path, files_config: Make) -> None:
    cfg = files_config(path=[write(tmp_path / "d", ["aa", "bb", "bb", "c"])], min_characters=2)
    with pytest.raises(TCError, match=r"4 read, 1 duplicates, 1 short.*\) 2 are left"):
        load_splits(cfg, seed=0)


def test_three_documents_are_enough(tmp_path: Path, files_config: Make) -> None:
    cfg = files_config(path=[write(tmp_path / "d", ["aa", "bb", "cc"])])
    splits = load_splits(cfg, seed=0)
    assert [len(splits.parts[part]) for part in PARTS] == [1, 0, 1, 1]


@pytest.mark.parametrize("total", range(60))
def test_apportion_adds_up_and_leaves_no_part_empty(total: int) -> None:
    sizes = apportion(total, SHARES)
    assert sum(sizes.values()) == total and min(sizes.values()) >= 0
    if total >= 4:
        assert min(sizes.values()) >= 1
    if total >= 20:
        assert all(abs(sizes[part] - total * SHARES[part]) < 1 for part in PARTS)


def test_apportion_is_exact_where_it_can_be_and_keeps_zero() -> None:
    assert list(apportion(200, SHARES).values()) == [30, 120, 20, 30]
    shares = {"calibration": 0.5, "training": 0.0, "selection": 0.25, "evaluation": 0.25}
    assert list(apportion(7, shares).values()) == [3, 0, 2, 2]


def named(tmp_path: Path, files_config: Make, **texts: list[str]) -> DataConfig:
    return files_config(**{part: [write(tmp_path / part, value)] for part, value in texts.items()})


def test_parts_by_name(tmp_path: Path, files_config: Make) -> None:
    cfg = named(
        tmp_path, files_config, calibration=["a", "b", "b"], selection=["c"], evaluation=["d"]
    )
    splits = load_splits(cfg, seed=0)
    assert {part: {d.text for d in docs} for part, docs in splits.parts.items()} == {
        "calibration": {"a", "b"},
        "training": set(),
        "selection": {"c"},
        "evaluation": {"d"},
    }
    assert splits.counts == {"read": 5, "duplicates": 1, "short": 0}


def test_document_in_two_named_parts_names_both_files(tmp_path: Path, files_config: Make) -> None:
    cfg = named(
        tmp_path, files_config, calibration=["a", "x  y"], selection=["c"], evaluation=["x y"]
    )
    with pytest.raises(TCError) as caught:
        load_splits(cfg, seed=0)
    message = str(caught.value)
    assert f"{tmp_path}/calibration/f001.txt (calibration)" in message
    assert f"{tmp_path}/evaluation/f000.txt (evaluation)" in message


def test_empty_named_part(tmp_path: Path, files_config: Make) -> None:
    cfg = named(tmp_path, files_config, calibration=["aa"], selection=["c"], evaluation=["dd"])
    with pytest.raises(TCError, match="too few documents: selection would be empty"):
        load_splits(replace(cfg, min_characters=2), seed=0)


def test_overlap_made_on_purpose_is_caught(tmp_path: Path, files_config: Make) -> None:
    path = write(tmp_path / "d", [f"document {n}" for n in range(20)])
    splits = load_splits(files_config(path=[path]), seed=0)
    prove_disjoint(splits)
    leaked = splits.parts["evaluation"][0]
    disguised = Document(leaked.text.replace(" ", "\n"), "leak")
    splits.parts["training"].append(disguised)
    with pytest.raises(TCError, match=r"leak \(training\)|leak.*\(training\)"):
        prove_disjoint(splits)


def test_a_twin_within_one_part_is_no_overlap() -> None:
    twin = Document("same", "x")
    prove_disjoint(Splits({"calibration": [twin, twin], "evaluation": []}, {}))


def test_record_is_json_and_follows_the_contents(tmp_path: Path, files_config: Make) -> None:
    path = write(tmp_path / "d", [f"document {n}" for n in range(20)])
    splits = load_splits(files_config(path=[path]), seed=0)
    record = json.loads(json.dumps(splits.record()))
    part = record["parts"]["selection"]
    assert record["counts"]["read"] == 20
    assert part["documents"] == len(part["hashes"]) == 2
    assert part["characters"] == sum(len(d.text) for d in splits.parts["selection"])
    assert all(len(value) == 16 for value in part["hashes"])
    splits.parts["selection"].pop()
    assert splits.record()["parts"]["selection"]["digest"] != part["digest"]


def problems(**values: object) -> str:
    return "\n".join(config_problems(DataConfig(**{"name": "t", "kind": DataKind.files, **values})))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "data.path is empty"),
        ({"path": []}, "data.path is empty"),
        ({"calibration": ["a"]}, "data.selection, data.evaluation must be given too"),
        ({"training": ["a"]}, "data.calibration, data.selection, data.evaluation must be given"),
        ({"path": ["x"], "calibration": ["a"]}, "data.path must be null"),
        ({"path": ["x"], "dataset": "y"}, "data.dataset has no effect for kind files"),
        ({"path": ["x"], "max_documents": 5}, "data.max_documents has no effect"),
        ({"path": ["x"], "shares": {"calibration": 1.0}}, "needed: calibration, training"),
        ({"path": ["x"], "shares": {**SHARES, "training": 0.9}}, "add up to 1.3"),
        ({"path": ["x"], "shares": {**SHARES, "training": -0.1}}, "data.shares.training is -0.1"),
        ({"path": ["x"], "shares": {**SHARES, "selection": 0}}, "data.shares.selection is 0"),
        ({"path": ["x"], "min_characters": -1}, "data.min_characters is -1"),
        ({"kind": DataKind.hf}, "data.dataset is null"),
        ({"kind": DataKind.hf, "dataset": "x", "max_documents": 0}, "data.max_documents is 0"),
        ({"kind": DataKind.hf, "dataset": "x", "path": ["a"]}, "data.path has no effect"),
        ({"kind": DataKind.speeches, "text_column": "x"}, "data.text_column has no effect"),
        ({"kind": DataKind.speeches, "evaluation": ["x"]}, "data.evaluation has no effect"),
    ],
)
def test_config_problems(values: dict[str, object], said: str) -> None:
    assert said in problems(**values)


def test_shares_with_named_parts_have_no_effect() -> None:
    parts = {part: ["x"] for part in PARTS}
    shares = {**SHARES, "training": 0.5, "evaluation": 0.25}
    assert problems(**parts) == ""
    assert "data.shares has no effect for kind files with parts by name" in problems(
        **parts, shares=shares
    )


def test_all_problems_come_at_once(files_config: Make) -> None:
    cfg = files_config(min_characters=-1, dataset="x")
    with pytest.raises(TCError) as caught:
        load_splits(cfg, seed=0)
    assert all(word in str(caught.value) for word in ("path", "min_characters", "dataset"))


def test_problems_of_files_come_at_once_and_not_by_the_thousand(
    tmp_path: Path, files_config: Make
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for n in range(MOST_LINES + 10):
        (folder / f"{n}.docx").write_text("x")
    with pytest.raises(TCError) as caught:
        load_splits(files_config(path=[f"{folder}/*", f"{tmp_path}/none*"]), seed=0)
    assert len(str(caught.value).splitlines()) == MOST_LINES + 2
    assert "and 11 more of the kind" in str(caught.value)
