"""Packing: boundaries, diversity, exact budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tc.data import Document, Packed, pack
from tc.data.tokens import encode, prefix_ids
from tc.errors import TCError

Tokenizer = PreTrainedTokenizerFast
Docs = Callable[..., list[Document]]


def pieces(packed: Packed) -> list[torch.Tensor]:
    """The pieces of all rows, cut where positions restart."""
    found = []
    for ids, positions in zip(packed.input_ids, packed.position_ids, strict=True):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(ids)]
        found += [ids[a:b] for a, b in pairwise(starts)]
    return found


def numbered(length: int) -> str:
    """A text in which every stretch of 8 characters is another."""
    return "".join(f"{n:07};" for n in range(length // 8 + 1))[:length]


def test_shapes_and_budget(plain: Tokenizer, docs: Docs) -> None:
    packed = pack(docs(100, 200, 300), plain, sequence_length=16, num_tokens=100, seed=0)
    assert packed.input_ids.shape == packed.position_ids.shape == (6, 16)
    assert packed.input_ids.dtype == packed.position_ids.dtype == torch.long
    assert packed.num_tokens == 96


def test_prefix(plain: Tokenizer, with_bos: Tokenizer) -> None:
    assert prefix_ids(plain).tolist() == []
    assert prefix_ids(with_bos).tolist() == [with_bos.bos_token_id]
    assert encode(with_bos, "ab").tolist() == encode(plain, "ab").tolist()


@pytest.mark.parametrize("bos", [False, True])
def test_no_piece_mixes_documents(
    plain: Tokenizer, with_bos: Tokenizer, docs: Docs, bos: bool
) -> None:
    tokenizer = with_bos if bos else plain
    packed = pack(docs(5, 7, 40, 11, 33, 3, 9, 16), tokenizer, 16, 96, seed=1)
    assert len(pieces(packed)) > len(packed.input_ids)
    for piece in pieces(packed):
        body = piece[1:] if bos else piece
        assert len(set(body.tolist())) <= 1
        if bos:
            assert piece[0] == tokenizer.bos_token_id
            assert tokenizer.bos_token_id not in body


def test_positions_count_up_from_each_boundary(plain: Tokenizer, docs: Docs) -> None:
    packed = pack(docs(5, 7, 40, 11, 33), plain, 16, 80, seed=1)
    for row in packed.position_ids:
        assert row[0] == 0
        assert all(b in (a + 1, 0) for a, b in pairwise(row.tolist()))


def test_merged_documents_would_be_caught(plain: Tokenizer, docs: Docs) -> None:
    """The control: without the restarts of positions, pieces do mix documents."""
    packed = pack(docs(5, 7, 9, 11), plain, 16, 16, seed=0)
    merged = Packed(packed.input_ids, torch.arange(16).expand_as(packed.position_ids))
    assert any(len(set(piece.tolist())) > 1 for piece in pieces(merged))


def test_whole_pieces_stand_alone_and_no_token_is_used_twice(plain: Tokenizer) -> None:
    text = numbered(1600)
    packed = pack([Document(text, "x")], plain, 16, 1600, seed=0)
    assert (packed.position_ids == torch.arange(16)).all()
    rows = [plain.decode(row) for row in packed.input_ids]
    assert sorted(rows) == [text[n : n + 16] for n in range(0, 1600, 16)]
    assert rows != sorted(rows)


def test_bos_takes_a_place(with_bos: Tokenizer) -> None:
    text = numbered(150)
    packed = pack([Document(text, "x")], with_bos, 16, 160, seed=0)
    rows = sorted(with_bos.decode(row[1:]) for row in packed.input_ids)
    assert rows == sorted(text[n : n + 15] for n in range(0, 150, 15))
    assert (packed.input_ids[:, 0] == with_bos.bos_token_id).all()


def test_documents_take_turns(plain: Tokenizer, docs: Docs) -> None:
    packed = pack(docs(160, 1600, 320, 160), plain, 16, 16 * 8, seed=0)
    owners = [row[0].item() for row in packed.input_ids]
    assert len(set(owners[:4])) == 4 and owners[:4] == owners[4:]


def test_only_needed_documents_are_tokenised(
    plain: Tokenizer, docs: Docs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    real = encode

    def counting(tokenizer: Tokenizer, text: str) -> torch.Tensor:
        calls[text[:1]] += 1
        return real(tokenizer, text)

    monkeypatch.setattr("tc.data.packing.encode", counting)
    pack(docs(*[160] * 20), plain, 16, 16 * 3, seed=0)
    assert sum(calls.values()) == 3
    calls.clear()
    pack(docs(*[160] * 20), plain, 16, 16 * 60, seed=0)
    assert len(calls) == 20 and max(calls.values()) == 1


def test_deterministic_by_seed(plain: Tokenizer) -> None:
    documents = [Document(numbered(300 + n), f"d{n}") for n in range(9)]
    one, same, other = (pack(documents, plain, 16, 160, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.input_ids, same.input_ids)
    assert torch.equal(one.position_ids, same.position_ids)
    assert not torch.equal(one.input_ids, other.input_ids)


def test_short_texts_fill_exactly(plain: Tokenizer, docs: Docs) -> None:
    packed = pack(docs(*[8] * 8), plain, 16, 64, seed=0)
    assert packed.num_tokens == 64
    counts = Counter(packed.input_ids.flatten().tolist())
    assert sorted(counts.values()) == [8] * 8


def test_overflow_is_cut(plain: Tokenizer, docs: Docs) -> None:
    packed = pack(docs(10, 10), plain, 16, 16, seed=0)
    assert sorted(Counter(packed.input_ids[0].tolist()).values()) == [6, 10]


def test_budget_below_one_sequence(plain: Tokenizer, docs: Docs) -> None:
    with pytest.raises(TCError, match="calibration set smaller than one sequence"):
        pack(docs(99), plain, sequence_length=16, num_tokens=15, seed=0)
    with pytest.raises(TCError, match=r"data\.selection_tokens=15"):
        pack(docs(99), plain, 16, 15, seed=0, part="selection")


def test_too_little_text_says_both_numbers(plain: Tokenizer, docs: Docs) -> None:
    with pytest.raises(TCError) as caught:
        pack(docs(20, 30), plain, 16, 1600, seed=0)
    message = str(caught.value)
    assert "48 tokens" in message or "32 tokens" in message
    assert "1600 are needed" in message and "data.calibration_tokens=" in message
    assert "data.path=" in message


@pytest.mark.parametrize("length", [0, 2])
def test_too_short_a_sequence(with_bos: Tokenizer, docs: Docs, length: int) -> None:
    with pytest.raises(TCError, match=r"data\.sequence_length"):
        pack(docs(99), with_bos, length, 64, seed=0)


@pytest.mark.parametrize("documents", [[], [Document(" \n", "x")]])
def test_empty_text(plain: Tokenizer, documents: list[Document]) -> None:
    with pytest.raises(TCError, match="no text for the calibration"):
        pack(documents, plain, 16, 64, seed=0)
