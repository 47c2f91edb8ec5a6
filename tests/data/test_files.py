"""Reading local files, good and bad."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tc.data.files import expand, read_file, read_files
from tc.errors import TCError


def lines(*rows: object) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def texts(path: Path, column: str = "text") -> list[str]:
    return [document.text for document in read_file(path, column)]


def test_text_is_one_document_with_plain_line_ends_and_no_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\n\r\ntwo \u00e9".encode())
    assert texts(path) == ["one\n\ntwo \u00e9"]
    assert read_file(path, "text")[0].source == str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.JSONL"])
def test_json_lines_are_a_document_each(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    row = json.dumps({"body": "one\u2028still one"}, ensure_ascii=False)
    path.write_text(f"{row}\n\n" + lines({"body": "two", "n": 1}), encoding="utf-8")
    assert texts(path, "body") == ["one\u2028still one", "two"]
    assert [document.source for document in read_file(path, "body")] == [f"{path}:1", f"{path}:3"]


def test_gzipped_text_and_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"zipped"))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines({"text": "row"}).encode()))
    assert texts(tmp_path / "a.txt.gz") == ["zipped"]
    assert texts(tmp_path / "b.jsonl.gz") == ["row"]


def test_parquet_rows_are_a_document_each(tmp_path: Path) -> None:
    folder = tmp_path / "key=1"
    folder.mkdir()
    path = folder / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2], "text": ["one", "two"]}), path)
    assert texts(path) == ["one", "two"]
    assert read_file(path, "text")[1].source == f"{path}#1"


def test_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "deep/er/b.txt", "odd[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand(["**/*.txt"], "k") == (
        sorted(map(Path, ["a.txt", "deep/er/b.txt", "odd[1].txt"])),
        [],
    )
    assert expand(["~/a.txt", f"{tmp_path}/a.*"], "k") == ([tmp_path / "a.txt"], [])
    assert expand(["odd[1].txt"], "k")[0] == [Path("odd[1].txt")]


def write_bad(folder: Path) -> None:
    (folder / "latin.txt").write_bytes("caf\u00e9".encode("latin1"))
    (folder / "word.docx").write_bytes(b"PK")
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"hello " * 99)[:-12])
    (folder / "not.txt.gz").write_bytes(b"no gzip")
    (folder / "cut.parquet").write_bytes(b"PAR1 and no more")
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), folder / "column.parquet")
    pq.write_table(pa.table({"text": ["x", None]}), folder / "null.parquet")
    pq.write_table(pa.table({"text": ["x"]}), folder / "zipped.parquet.gz")
    (folder / "syntax.jsonl").write_text('{"text": "ok"}\n{"text": \n')
    (folder / "array.json").write_text('[{"text": "x"}]')
    (folder / "key.jsonl").write_text(lines({"content": "x", "id": 3}))
    (folder / "number.jsonl").write_text(lines({"text": 3}))
    (folder / "half.jsonl").write_text('{"text": "\\ud800"}\n')


BAD = {
    "latin.txt": "not UTF-8",
    "word.docx": "allowed are .txt",
    "cut.txt.gz": "not a whole gzip",
    "not.txt.gz": "not a whole gzip",
    "cut.parquet": "not a whole Parquet",
    "column.parquet": "there are: body, n",
    "null.parquet": "holds null",
    "zipped.parquet.gz": "extension is not known",
    "syntax.jsonl": "syntax.jsonl:2: not JSON",
    "array.json": "a list",
    "key.jsonl": "there are: content, id",
    "number.jsonl": "holds a int",
    "half.jsonl": "surrogate",
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_file_is_named(tmp_path: Path, name: str) -> None:
    write_bad(tmp_path)
    with pytest.raises(TCError) as caught:
        read_file(tmp_path / name, "text")
    assert BAD[name] in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(TCError, match=r"gone\.txt: cannot be read"):
        read_file(tmp_path / "gone.txt", "text")


def test_problems_are_gathered_and_good_files_still_read(tmp_path: Path) -> None:
    write_bad(tmp_path)
    (tmp_path / "good.txt").write_text("good")
    patterns = [f"{tmp_path}/*", f"{tmp_path}/none*.txt", str(tmp_path)]
    documents, problems = read_files(patterns, "data.path", "text")
    assert [document.text for document in documents] == ["good"]
    assert len(problems) == len(BAD) + 2
    assert "data.path" in problems[0] and "matches no file" in problems[0]
    assert "is a folder" in problems[1] and "/**/*.txt" in problems[1]
