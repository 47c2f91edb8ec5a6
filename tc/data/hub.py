"""Documents from a dataset of the Hugging Face hub, or a local dataset folder, streamed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any

from tc.config import DataConfig
from tc.data.documents import Document
from tc.data.files import checked_text, no_column
from tc.errors import TCError
from tc.network import offline_if_unreachable


def read_hub(cfg: DataConfig) -> list[Document]:
    """Reads the first `max_documents` rows of a dataset, in its own order.

    Raises:
        TCError: if the dataset cannot be had, or its text column is missing or not text.
    """
    name = os.path.expanduser(str(cfg.dataset))
    documents = []
    for n, row in enumerate(_rows(name, cfg)):
        where = f"{name}:{n}"
        if cfg.text_column not in row:
            raise TCError(no_column(where, cfg.text_column, list(row)))
        text = checked_text(row[cfg.text_column], where, cfg.text_column)
        documents.append(Document(text, where))
    return documents


def _rows(name: str, cfg: DataConfig) -> Iterator[Mapping[str, Any]]:
    """The rows of a dataset."""
    # The import takes a second that other kinds of data need not spend.
    import datasets

    try:
        with nullcontext() if os.path.isdir(name) else offline_if_unreachable():
            rows = datasets.load_dataset(name, cfg.subset, split=cfg.split, streaming=True)
            yield from islice(rows, cfg.max_documents)
    # Network, hub, file formats and the builder each raise their own kinds.
    except Exception as error:
        raise TCError(_not_had(name, cfg, error)) from error


def _not_had(name: str, cfg: DataConfig, error: Exception) -> str:
    """What to say of a dataset that could not be read."""
    first = (str(error) or type(error).__name__).splitlines()[0]
    return (
        f"the dataset {name} (subset {cfg.subset}, split {cfg.split}) cannot be read: {first}\n"
        "Check data.dataset, data.subset and data.split; the hub needs a network (and "
        "`hf auth login` for a gated dataset). Without one, give the folder of a downloaded "
        "dataset as data.dataset, or files: data=files data.path=[...], or data=speeches."
    )
