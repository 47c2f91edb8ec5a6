"""Text that cannot be read, and names that are hard to read it by."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fault_helpers import configured, said, unfinished

from tc.check import validate
from tc.config import DataConfig, DataKind, literal, read_config, typed
from tc.data import load_splits
from tc.run_folder import RunFolder

TEXT = "My fellow Americans. " * 40
ROW = json.dumps({"text": TEXT}).encode() + b"\n"


def parquet(path: Path, column: str = "text", values: object = (TEXT,)) -> bytes:
    pq.write_table(pa.table({column: list(values)}), path)  # type: ignore[call-overload]
    data = path.read_bytes()
    path.unlink()
    return data


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def middle(data: bytes) -> bytes:
    return flipped(data, len(data) // 2)


Made = bytes | Callable[[Path], bytes]
BAD_FILES: list[tuple[str, Made, str]] = [
    ("empty.txt", b"", "too few documents"),
    ("spaces.txt", b" \n\t" * 500, "too few documents"),
    ("short.txt", b"four words and nothing", "too few documents"),
    ("one.txt", TEXT.encode(), "too few documents"),
    ("binary.txt", bytes(range(256)) * 9, "not UTF-8"),
    ("latin1.txt", ("d\u00e9j\u00e0 vu " * 99).encode("latin-1"), "not UTF-8"),
    ("utf16.txt", TEXT.encode("utf-16"), "not UTF-8"),
    ("utf32.txt", ("\ufeff" + TEXT).encode("utf-32-le"), "not UTF-8"),
    ("cut.txt", (TEXT + "\u20ac").encode()[:-1], "not UTF-8"),
    ("nuls.txt", b"\0" * 999, "too few documents"),
    ("text.doc", TEXT.encode(), "this extension is not known"),
    ("noextension", TEXT.encode(), "this extension is not known"),
    ("x.tar.gz", gzip.compress(ROW), "this extension is not known"),
    ("x.parquet.gz", gzip.compress(ROW), "this extension is not known"),
    ("x.pkl", b"\x80\x04N.", "this extension is not known"),
    ("x.pt", b"PK\x03\x04", "this extension is not known"),
    ("x.zip", b"PK\x03\x04", "this extension is not known"),
    ("no.txt.gz", TEXT.encode(), "not a whole gzip"),
    ("empty.jsonl.gz", b"", "too few documents"),
    ("cut.jsonl.gz", gzip.compress(ROW * 99)[:-20], "not a whole gzip"),
    ("flip.jsonl.gz", middle(gzip.compress(ROW * 99)), "not a whole gzip"),
    ("crc.jsonl.gz", flipped(gzip.compress(ROW), len(gzip.compress(ROW)) - 7), "not a whole gzip"),
    ("bin.jsonl.gz", gzip.compress(b"\xff\xfe\xfd"), "not UTF-8"),
    ("cut.jsonl", ROW + ROW[:-9], "cut.jsonl:2: not JSON"),
    ("words.jsonl", b"hello\n", "not JSON"),
    ("array.jsonl", b'["a"]\n', "one JSON object"),
    ("number.jsonl", b"1\n", "one JSON object"),
    ("null.jsonl", b"null\n", "one JSON object"),
    ("pretty.json", json.dumps({"text": TEXT}, indent=1).encode(), "not JSON"),
    ("nocolumn.jsonl", b'{"body":"x"}\n', "no column 'text'"),
    ("nulltext.jsonl", b'{"text":null}\n', "holds null"),
    ("list.jsonl", b'{"text":["a"]}\n', "a list"),
    ("int.jsonl", b'{"text":5}\n', "a int"),
    ("surrogate.jsonl", b'{"text":"\\ud800"}\n', "surrogate"),
    ("deep.jsonl", b'{"text":' + b"[" * 200_000 + b"\n", "not JSON"),
    ("long.jsonl", b'{"text":' + b"9" * 5000 + b"}\n", "not JSON"),
    ("binary.jsonl", b"\x80\x04\x95\n", "not UTF-8"),
    ("latin1.jsonl", b'{"text":"d\xe9j\xe0"}\n', "not UTF-8"),
    ("utf16.jsonl", ROW.decode().encode("utf-16"), "not UTF-8"),
    ("empty.parquet", b"", "not a whole Parquet"),
    ("words.parquet", b"hello hello hello", "not a whole Parquet"),
    ("magic.parquet", b"PAR1" + b"\0" * 40 + b"PAR1", "not a whole Parquet"),
    ("cut.parquet", lambda p: parquet(p)[:-10], "not a whole Parquet"),
    (
        "footer.parquet",
        lambda p: parquet(p)[:-60] + b"\0" * 52 + parquet(p)[-8:],
        "not a whole Parquet",
    ),
    ("head.parquet", lambda p: flipped(parquet(p, values=[TEXT] * 50), 20), "not a whole Parquet"),
    ("nocolumn.parquet", lambda p: parquet(p, "body"), "no column 'text'"),
    ("ints.parquet", lambda p: parquet(p, values=[1, 2]), "a int"),
    ("nulls.parquet", lambda p: parquet(p, values=[TEXT, None]), "holds null"),
    ("bytes.parquet", lambda p: parquet(p, values=[b"\xff"]), "a bytes"),
    ("norows.parquet", lambda p: parquet(p, values=[]), "too few documents"),
]


@pytest.mark.parametrize(
    ("name", "made", "word"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES]
)
def test_a_bad_file(name: str, made: Made, word: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(made if isinstance(made, bytes) else made(path))
    cfg = DataConfig(name="files", kind=DataKind.files, path=[str(path)])
    message = said(lambda: load_splits(cfg, 0))
    assert word in message
    assert name in message or "too few" in word
    assert list(tmp_path.iterdir()) == [path]


NAMES = [
    *("new\nline", "tab\tname", "it's", 'say "so"', "back\\slash", "comma,comma", "[brackets]"),
    *("{a,b}", "star*", "ask?", "$HOME", "${seed}", "${oc.env:HOME}", "\\${seed}", "#hash", "a=b"),
    *(
        "-rf",
        "--help",
        "~home",
        " lead",
        "trail ",
        "\u00fcml\u00e4ut",
        "\u65e5\u672c",
        "\U0001f600",
    ),
    *("%s%d", "a;b", "a&b", "a|b", "`id`", "$(id)", "<a>", "null", "true", "1e5", "..x", "x" * 240),
    *(": colon", "- dash", "? mark", "!tag", "&anchor", "*alias", "@at", "%percent", "\u202ertl"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_hard_to_read(name: str, tmp_path: Path) -> None:
    """The file is read; where it is missing the message has its name; the run folder holds it."""
    folder = tmp_path / name
    folder.mkdir()
    for n in range(4):
        (folder / f"{n}.txt").write_text(f"{n} {TEXT}")
    files = [str(folder / f"{n}.txt") for n in range(4)]
    splits = load_splits(DataConfig(name="files", kind=DataKind.files, path=files), 0)
    assert splits.counts["read"] == 4

    cfg = configured(tmp_path, ("data=files",))
    cfg.data.path, cfg.run_dir = literal(files), str(tmp_path / "run")
    validate(typed(cfg))
    assert typed(cfg).data.path == files
    RunFolder(tmp_path / "run", cfg, resume=True)
    again = read_config(tmp_path / "run" / "config.yaml")
    assert list(again.data.path) == files
    RunFolder(tmp_path / "run", cfg, resume=True)  # and the next run finds it the same

    gone = DataConfig(name="files", kind=DataKind.files, path=[str(folder / "gone.txt")])
    assert str(folder) in said(lambda: load_splits(gone, 0))
    assert unfinished(tmp_path / "run") == []


@pytest.mark.parametrize("name", ["x" * 256, "nul\0byte", "a/" * 2050])
def test_a_name_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    cfg = DataConfig(name="files", kind=DataKind.files, path=[f"{tmp_path}/{name}"])
    assert "matches no file" in said(lambda: load_splits(cfg, 0))


def test_the_same_text_in_two_parts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT.replace(" ", "  "))
    parts = {name: [str(tmp_path / "a.txt")] for name in ("calibration", "selection")}
    cfg = DataConfig(
        name="files", kind=DataKind.files, evaluation=[str(tmp_path / "b.txt")], **parts
    )
    assert "stands in two parts" in said(lambda: load_splits(cfg, 0))
