"""Windows: every target counts exactly once, checked against brute force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tc.data import Document, collate, nested_windows, windows
from tc.errors import TCError

Tokenizer = PreTrainedTokenizerFast
Docs = Callable[..., list[Document]]


def unique_text(length: int, document: int) -> str:
    """A text of which every character is another, also from other documents' characters."""
    assert length <= 200
    return "".join(chr(0x4E00 + 200 * document + n) for n in range(length))


def one_token_a_character(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer with BOS if the one given has it; each letter of `unique_text` is a token."""
    vocab = {**{chr(0x4E00 + n): n for n in range(1000)}, "a": 1000}
    backend = Backend(BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(["<s>"])
    if tokenizer("").input_ids:
        special = [("<s>", backend.token_to_id("<s>"))]
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("lengths", [(1, 2, 3), (17, 16, 15), (64, 100, 33)])
@pytest.mark.parametrize(("context", "stride"), [(16, 16), (16, 15), (16, 5), (16, 1), (3, 3)])
def test_every_token_counts_once(
    plain: Tokenizer,
    with_bos: Tokenizer,
    bos: bool,
    lengths: tuple[int, ...],
    context: int,
    stride: int,
) -> None:
    tokenizer = one_token_a_character(with_bos if bos else plain)
    documents = [Document(unique_text(n, k), f"d{k}") for k, n in enumerate(lengths)]
    # Without a BOS nothing predicts the first token of a document.
    expected = Counter("".join(d.text if bos else d.text[1:] for d in documents))
    total = sum(expected.values())
    result = windows(documents, tokenizer, total, context, stride, seed=0)
    counted: Counter[str] = Counter()
    for window in result:
        assert len(window.input_ids) == len(window.counted) <= context
        assert not window.counted[0] and window.counted.any()
        decoded = "".join(tokenizer.convert_ids_to_tokens(window.input_ids.tolist())).removeprefix(
            "<s>"
        )
        assert any(decoded in document.text for document in documents)
        ids = window.input_ids[window.counted].tolist()
        counted.update(tokenizer.convert_ids_to_tokens(ids))
    assert counted == expected
    with pytest.raises(TCError, match=f"have {total} predicted tokens"):
        windows(documents, tokenizer, total + 1, context, stride, seed=0)


def test_windows_without_overlap_would_be_caught(plain: Tokenizer) -> None:
    """The control: starts every `context` tokens leave the first token of each window out."""
    text = unique_text(64, 0)
    tokenizer = one_token_a_character(plain)
    naive = [text[n : n + 16][1:] for n in range(0, 64, 16)]
    right = windows([Document(text, "x")], tokenizer, 63, 16, 16, seed=0)
    assert sum(map(len, naive)) == 60
    assert sum(int(window.counted.sum()) for window in right) == 63


def test_starts_and_counts(plain: Tokenizer) -> None:
    tokenizer = one_token_a_character(plain)
    text = unique_text(40, 0)
    result = windows([Document(text, "x")], tokenizer, 39, context=16, stride=8, seed=0)
    assert [window.input_ids[0].item() for window in result] == [0, 8, 16, 24]
    assert [int(window.counted.sum()) for window in result] == [15, 8, 8, 8]
    assert all(window.counted[-8:].all() for window in result)


def test_bos_starts_each_window_and_never_counts(with_bos: Tokenizer, docs: Docs) -> None:
    result = windows(docs(50, 50), with_bos, 100, context=16, stride=8, seed=0)
    assert all(window.input_ids[0] == with_bos.bos_token_id for window in result)
    assert not any(window.counted[0] for window in result)
    assert int(result[0].counted.sum()) == 15


def test_documents_take_turns_and_the_last_is_trimmed(plain: Tokenizer, docs: Docs) -> None:
    result = windows(docs(40, 40, 40), plain, tokens=50, context=16, stride=8, seed=0)
    assert [int(window.counted.sum()) for window in result] == [15, 15, 15, 5]
    assert len({window.input_ids[0].item() for window in result[:3]}) == 3
    assert torch.equal(result[3].input_ids, result[0].input_ids)
    assert result[3].counted.tolist() == [False] * 8 + [True] * 5 + [False] * 3


def test_only_needed_documents_are_tokenised(
    plain: Tokenizer, docs: Docs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counting(tokenizer: Tokenizer, text: str) -> torch.Tensor:
        calls.append(text)
        return torch.arange(len(text))

    monkeypatch.setattr("tc.data.window.encode", counting)
    windows(docs(*[100] * 20), plain, tokens=30, context=16, stride=8, seed=0)
    assert len(calls) == 2


def test_deterministic_by_seed(plain: Tokenizer, docs: Docs) -> None:
    documents = docs(*[30] * 9)
    one, same, other = (windows(documents, plain, 90, 16, 8, seed=s) for s in (0, 0, 1))
    first = [window.input_ids[0].item() for window in one]
    assert first == [window.input_ids[0].item() for window in same]
    assert first != [window.input_ids[0].item() for window in other]


@pytest.mark.parametrize(
    ("tokens", "context", "stride", "said"),
    [
        (0, 16, 8, "eval.tokens is 0"),
        (9, 1, 1, "eval.context is 1; at least 2"),
        (9, 16, 0, "eval.stride is 0"),
        (9, 16, 17, "eval.stride is 17; 1 to eval.context=16"),
    ],
)
def test_wrong_sizes(
    plain: Tokenizer, docs: Docs, tokens: int, context: int, stride: int, said: str
) -> None:
    with pytest.raises(TCError, match=said):
        windows(docs(99), plain, tokens, context, stride, seed=0)


def test_no_text(plain: Tokenizer) -> None:
    with pytest.raises(TCError, match="no text for the evaluation"):
        windows([], plain, 9, 16, 8, seed=0)


def test_collate_pads_on_the_right(plain: Tokenizer, docs: Docs) -> None:
    batch = collate(windows(docs(5, 9), plain, 12, 16, 16, seed=0), pad_id=7)
    lengths = batch["attention_mask"].sum(1).tolist()
    assert sorted(lengths) == [5, 9]
    assert batch["input_ids"].shape == batch["counted"].shape == (2, 9)
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.long
    assert batch["counted"].dtype == torch.bool and int(batch["counted"].sum()) == 12
    short = lengths.index(5)
    assert batch["input_ids"][short, 5:].tolist() == [7] * 4
    assert batch["attention_mask"][short].tolist() == [1] * 5 + [0] * 4
    assert not batch["counted"][short, 5:].any()


@pytest.mark.parametrize("bos", [False, True])
def test_nested_windows_of_every_context_count_the_same_targets(
    plain: Tokenizer, with_bos: Tokenizer, bos: bool
) -> None:
    tokenizer = one_token_a_character(with_bos if bos else plain)
    documents = [Document(unique_text(n, k), f"d{k}") for k, n in enumerate((70, 31, 40))]
    stretches = nested_windows(documents, tokenizer, 3, [8, 13, 32], seed=0)
    room = 31 if bos else 32
    for stretch in stretches:
        assert list(stretch) == [8, 13, 32]
        longest = stretch[32][0]
        assert len(stretch[32]) == 1 and len(longest.input_ids) == 32
        assert longest.counted.tolist() == [False] + [True] * 31
        text = longest.input_ids[1:] if bos else longest.input_ids
        assert len(text) == room
        for context, cut in stretch.items():
            targets = torch.cat([window.input_ids[window.counted] for window in cut])
            assert targets.tolist() == longest.input_ids[1:].tolist()
            assert max(len(window.input_ids) for window in cut) == context
            starts = {int(window.input_ids[0]) for window in cut}
            assert not bos or starts == {tokenizer.bos_token_id}
    firsts = [int(stretch[32][0].input_ids[int(bos)]) for stretch in stretches]
    # Whole stretches of documents in turns; what is shorter gives none.
    assert len(set(firsts)) == 3 and all(first % 200 in (0, room) for first in firsts)
    assert not bos or 200 in firsts


def test_nested_windows_need_whole_stretches(plain: Tokenizer, docs: Docs) -> None:
    with pytest.raises(TCError, match="have 3 stretches of 32 tokens, and 4 are needed"):
        nested_windows(docs(64, 31, 40), plain, 4, [8, 32], seed=0)
