"""A tokenizer of one token a byte, with and without a BOS, and documents of known letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tc.config import DataConfig, DataKind
from tc.data import Document

BOS = "<s>"


def byte_tokenizer(bos: bool) -> PreTrainedTokenizerFast:
    vocab = {letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([BOS])
    if bos:
        special = [(BOS, backend.token_to_id(BOS))]
        backend.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS)


@pytest.fixture(scope="session")
def plain() -> PreTrainedTokenizerFast:
    """One token a byte, no special tokens."""
    return byte_tokenizer(bos=False)


@pytest.fixture(scope="session")
def with_bos() -> PreTrainedTokenizerFast:
    """One token a byte, and a BOS before each text."""
    return byte_tokenizer(bos=True)


@pytest.fixture
def docs() -> Callable[..., list[Document]]:
    """Makes documents of given lengths; each has letters of its own, so tokens tell theirs."""

    def make(*lengths: int) -> list[Document]:
        return [Document(chr(ord("A") + n) * length, f"doc{n}") for n, length in enumerate(lengths)]

    return make


@pytest.fixture
def files_config() -> Callable[..., DataConfig]:
    """Makes a configuration of kind `files` that drops no short text."""

    def make(**values: Any) -> DataConfig:
        return DataConfig(**{"name": "t", "kind": DataKind.files, "min_characters": 1, **values})

    return make
