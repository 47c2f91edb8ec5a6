"""What packing and windows share: tokens of a document, and turns between documents."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from tc.data.documents import Document
from tc.errors import TCError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Token ids of a text without special tokens, Long [T]."""
    # verbose=False: a text longer than the model's context is no fault, it is cut afterwards.
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The special tokens that the tokenizer puts before a text by default, Long [P], often none.

    Found by comparison, because tokenizers say it in several ways (`add_bos_token`, templates).
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    default = tokenizer("a")["input_ids"]
    starts = range(len(default) - len(plain) + 1)
    start = next((n for n in starts if default[n : n + len(plain)] == plain), 0)
    return torch.tensor(default[:start], dtype=torch.long)


def shuffled(documents: list[Document], seed: int, purpose: str) -> list[Document]:
    """The documents in a seeded order.

    Raises:
        TCError: if there is no text at all.
    """
    order = [document for document in documents if document.text.strip()]
    if not order:
        raise TCError(f"no text for the {purpose}: give documents (data.path=[...], or data=...)")
    random.Random(f"{purpose} {seed}").shuffle(order)
    return order


def take_turns(sources: Iterable[Iterator[Item]]) -> Iterator[Item]:
    """One item of each source, then a second of each, until all are empty.

    Sources are asked in their order and only when reached, so what is not needed is not computed.
    """
    waiting = sources
    while True:
        alive = []
        for source in waiting:
            for item in source:
                yield item
                alive.append(source)
                break
        if not alive:
            return
        waiting = alive
