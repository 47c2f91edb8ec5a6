"""The tokenizers of GGUF files cut text as the original ones do."""

from __future__ import annotations

import pytest
from teacher_helpers import MERGES, TOKENS, gguf_cfg
from transformers import AutoTokenizer

from tc.teacher import convert_gguf, load_teacher

TEXT = (
    "It was 2024\u2019s  caf\u00e9 \u2014 na\u00efve, 17 foxes\r\n\n"
    "\the jumped; \u65e5\u672c \U0001f642 the end.  "
)


@pytest.fixture
def tokenizer(export, tmp_path):
    def run(architecture: str = "llama", **header):
        path, _ = export(architecture, **header)
        return load_teacher(gguf_cfg(path), tmp_path / "cache").tokenizer

    return run


def words(tokenizer, text: str) -> list[str]:
    backend = tokenizer.backend_tokenizer
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_text_comes_back_exactly(architecture, pre, tokenizer) -> None:
    made = tokenizer(architecture, tokenizer__ggml__pre=pre)
    ids = made(TEXT).input_ids
    assert made.decode(ids) == TEXT
    assert made.decode(made(TEXT, add_special_tokens=False).input_ids) == TEXT
    assert TOKENS.index("\u0120he") in made("so he").input_ids


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_auto_tokenizer_reads_the_folder_alike(architecture, export, tmp_path) -> None:
    """Transformers has classes of its own for these types, with cutting of their own."""
    path, _ = export(architecture)
    folder = convert_gguf(path, tmp_path / "cache")
    teacher = load_teacher(gguf_cfg(path), tmp_path / "cache")
    auto = AutoTokenizer.from_pretrained(folder)
    assert auto(TEXT).input_ids == teacher.tokenizer(TEXT).input_ids
    assert words(auto, TEXT) == words(teacher.tokenizer, TEXT)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["in", "\u0120", "2", "0", "2", "4", "!"]),
        ("qwen2", ["in", "\u0120", "2", "0", "2", "4", "!"]),
        ("llama-bpe", ["in", "\u0120", "202", "4", "!"]),
        ("gpt-2", ["in", "\u01202024", "!"]),
    ],
)
def test_digits(pre, expected, tokenizer) -> None:
    assert words(tokenizer(tokenizer__ggml__pre=pre), "in 2024!") == expected


def test_qwen2_cuts_as_transformers_qwen2_does(tokenizer) -> None:
    from transformers.models.qwen2 import Qwen2Tokenizer

    theirs = Qwen2Tokenizer(vocab={}, merges=[])
    made = tokenizer("qwen2")
    assert words(made, TEXT) == words(theirs, TEXT)
    assert type(made.backend_tokenizer.normalizer) is type(theirs.backend_tokenizer.normalizer)


def test_special_tokens(tokenizer) -> None:
    made = tokenizer()
    assert made("a<|end|><think>b").input_ids == [64, 258, 259, 65]
    assert made.decode([64, 258, 259, 65], skip_special_tokens=True) == "a<think>b"
    assert (made.eos_token_id, made.bos_token_id, made.pad_token_id) == (258, 258, 258)
    assert "[PAD260]" not in made.get_vocab()
    assert made("he").input_ids == [256]
    assert MERGES[0] == "h e"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({}, [64]),
        ({"tokenizer__ggml__add_bos_token": True}, [258, 64]),
        ({"tokenizer__ggml__add_eos_token": True}, [64, 258]),
        ({"tokenizer__ggml__add_bos_token": None}, [64]),
        ({"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__add_bos_token": None}, [258, 64]),
        ({"tokenizer__ggml__pre": "llama-bpe"}, [64]),
    ],
)
def test_what_is_put_around_a_text(header, expected, tokenizer) -> None:
    assert tokenizer(**header)("a").input_ids == expected


def test_chat_template(tokenizer) -> None:
    template = "{% for m in messages %}<|end|>{{ m['content'] }}{% endfor %}"
    made = tokenizer(tokenizer__chat_template=template)
    chat = [{"role": "user", "content": "a"}]
    assert made.apply_chat_template(chat, tokenize=False) == "<|end|>a"
