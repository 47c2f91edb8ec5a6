"""Documents from local files: text, JSON lines and Parquet."""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tc.data.documents import Document
from tc.errors import TCError

ALLOWED = ".txt, .jsonl, .json (one object a line), each of them with .gz, or .parquet"


def read_files(patterns: list[str], key: str, column: str) -> tuple[list[Document], list[str]]:
    """Reads every file that the patterns match.

    Args:
        patterns: globs, relative or absolute, with `~` and `**`; a name that exists is itself.
        key: the configuration key that holds them, for messages.
        column: the JSON key or Parquet column of the text.

    Returns:
        The documents in the order of the files' names, and the problems, a line each.
    """
    paths, problems = expand(patterns, key)
    documents: list[Document] = []
    for path in paths:
        try:
            documents += read_file(path, column)
        except TCError as error:
            problems.append(str(error))
    return documents, problems


def expand(patterns: list[str], key: str) -> tuple[list[Path], list[str]]:
    """Turns patterns to sorted file names, each once, and a problem for each that has none."""
    paths: set[Path] = set()
    problems = []
    for pattern in patterns:
        name = os.path.expanduser(pattern)
        # A name may hold glob characters itself: one that exists is not read as a pattern.
        matches = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        files = {Path(match) for match in matches if os.path.isfile(match)}
        if not files:
            problems.append(_no_match(pattern, key, folder=os.path.isdir(name)))
        paths |= files
    return sorted(paths), problems


def _no_match(pattern: str, key: str, folder: bool) -> str:
    """What to say of a pattern without files."""
    if folder:
        return f"{key}: {pattern} is a folder; name its files, such as '{pattern}/**/*.txt'"
    return (
        f"{key}: {pattern} matches no file, seen from {os.getcwd()}; give a file or a glob "
        f"(* within a folder, ** through folders) of {ALLOWED}"
    )


def read_file(path: Path, column: str) -> list[Document]:
    """Reads the documents of one file.

    Raises:
        TCError: if the extension is unknown, the file damaged or not UTF-8, or a text missing.
    """
    packed = path.suffix.lower() == ".gz"
    suffix = Path(path.stem if packed else path.name).suffix.lower()
    reader = READERS.get(suffix)
    if reader is None or (packed and suffix == ".parquet"):
        raise TCError(f"{path}: this extension is not known; allowed are {ALLOWED}")
    with _damage(path):
        return reader(path, column)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turns what a damaged or unreadable file raises to one line that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise TCError(
            f"{path}: not UTF-8 (byte {error.start}); convert it, for instance with "
            "iconv -f latin1 -t utf-8"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TCError(f"{path}: not a whole gzip file ({error}); make or fetch it anew") from error
    except OSError as error:
        raise TCError(f"{path}: cannot be read ({error.strerror or error})") from error


def _decoded(path: Path) -> str:
    """The text of a file, unzipped where its name says so, with plain line ends."""
    data = path.read_bytes()
    if path.suffix.lower() == ".gz":
        data = gzip.decompress(data)
    return data.decode("utf-8-sig").replace("\r\n", "\n")


def _read_text(path: Path, column: str) -> list[Document]:
    return [Document(_decoded(path), str(path))]


def _read_lines(path: Path, column: str) -> list[Document]:
    # str.splitlines would also cut at U+2028, which is legal inside a JSON string.
    lines = enumerate(_decoded(path).split("\n"), start=1)
    return [_read_line(line, f"{path}:{n}", column) for n, line in lines if line.strip()]


def _read_line(line: str, where: str, column: str) -> Document:
    """The document of one JSON line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # of which an endless number is one
        raise TCError(f"{where}: not JSON ({error}); each line is to be one object") from error
    if not isinstance(row, dict):
        raise TCError(f"{where}: a {type(row).__name__}; each line is to be one JSON object")
    if column not in row:
        raise TCError(no_column(where, column, list(row)))
    return Document(checked_text(row[column], where, column), where)


def _read_parquet(path: Path, column: str) -> list[Document]:
    """The documents of a Parquet file; only the text column is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise TCError(no_column(str(path), column, file.schema_arrow.names))
            values = file.read(columns=[column]).column(column).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise TCError(f"{path}: not a whole Parquet file ({error})") from error
    rows = [(value, f"{path}#{n}") for n, value in enumerate(values)]
    return [Document(checked_text(value, where, column), where) for value, where in rows]


READERS: dict[str, Callable[[Path, str], list[Document]]] = {
    ".txt": _read_text,
    ".jsonl": _read_lines,
    ".json": _read_lines,
    ".parquet": _read_parquet,
}


def no_column(where: str, column: str, there: list[str]) -> str:
    """What to say where the text column is missing."""
    names = ", ".join(map(str, there)) or "none"
    return f"{where}: no column '{column}'; there are: {names}. Choose one with text_column=..."


def checked_text(value: object, where: str, column: str) -> str:
    """Returns a value that is a string of valid Unicode.

    Raises:
        TCError: if it is anything else.
    """
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise TCError(f"{where}: column '{column}' holds {kind}; allowed is text only")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise TCError(f"{where}: half a surrogate pair in '{column}'; mend the line") from error
    return value
