"""Training text: on disk, packed, no token twice, the same steps on any number of devices."""

from __future__ import annotations

import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from tc.artifacts import StreamedTensors, hash_file, load_tensors
from tc.config import RecoveryStageConfig
from tc.data import (
    Document,
    RankedSequences,
    TrainingTokens,
    packing,
    sequences_wanted,
    steps_of,
    training,
    write_training,
)
from tc.errors import TCError

Tokenizer = PreTrainedTokenizerFast
Docs = Callable[..., list[Document]]

LETTERS = 8000
BOS_ID = LETTERS + 1
WANTED = {"stage1": (24, 16), "stage2": (12, 64)}
"""The stages of most tests: 6 steps of 4 sequences, then 3 of 4 longer ones."""
SEQUENCES_A_STEP = 4


@cache
def letters(bos: bool) -> Tokenizer:
    """A tokenizer of one token a letter, for the letters of `unique_documents`."""
    vocab = {**{chr(0x4E00 + n): n for n in range(LETTERS)}, "a": LETTERS}
    backend = Backend(BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(["<s>"])
    assert backend.token_to_id("<s>") == BOS_ID
    if bos:
        special = [("<s>", BOS_ID)]
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def unique_documents(lengths: Iterable[int]) -> list[Document]:
    """Documents of which no letter comes twice, neither within one nor in another."""
    start, documents = 0, []
    for length in lengths:
        text = "".join(chr(0x4E00 + n) for n in range(start, start + length))
        documents.append(Document(text, f"doc{start}"))
        start += length
    assert start <= LETTERS
    return documents


def many_lengths() -> list[int]:
    """Lengths below, at and above those of sequences."""
    return [1, 5, 15, 16, 17, 30, 31, 63, 64, 65, 100, 190] * 5


def write(folder: Path, bos: bool = True, seed: int = 0, **wanted: tuple[int, int]) -> Path:
    documents = unique_documents(many_lengths())
    write_training(folder, letters(bos), documents, wanted or WANTED, seed)
    return folder


def items(dataset: TrainingTokens) -> list[tuple[list[int], list[int]]]:
    return [(ids.tolist(), positions.tolist()) for ids, positions in dataset]


def pieces(dataset: TrainingTokens) -> Iterator[list[int]]:
    """The pieces of all sequences, cut where positions restart."""
    for ids, positions in items(dataset):
        starts = [n for n, position in enumerate(positions) if position == 0]
        for start, end in pairwise([*starts, len(ids)]):
            assert positions[start:end] == list(range(end - start))
            yield ids[start:end]


def seen(folder: Path, world_size: int, sampler: type[RankedSequences]) -> Counter[int]:
    """How often each token of the text comes, over both stages and all devices."""
    counts: Counter[int] = Counter()
    for stage, (num_sequences, _) in WANTED.items():
        dataset = TrainingTokens(folder / f"{stage}.safetensors")
        for rank in range(world_size):
            for n in sampler(num_sequences, SEQUENCES_A_STEP, rank, world_size, 0):
                counts.update(dataset[n][0].tolist())
    del counts[BOS_ID]
    return counts


class Overlapping(RankedSequences):
    """Wrong on purpose: every device takes what the first one should have."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rank = 0


# What is written.


@pytest.mark.parametrize("bos", [False, True])
def test_shapes_and_counts(tmp_path: Path, bos: bool) -> None:
    done: list[int] = []
    documents = unique_documents(many_lengths())
    counts = write_training(tmp_path, letters(bos), documents, WANTED, 0, done.append)
    assert counts == {"stage1_tokens": 24 * 16, "stage2_tokens": 12 * 64}
    assert sum(done) == sum(counts.values())
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{s}.safetensors" for s in WANTED]
    for stage, shape in WANTED.items():
        stored = load_tensors(tmp_path / f"{stage}.safetensors")
        assert sorted(stored) == ["input_ids", "position_ids"]
        assert {(t.dtype, tuple(t.shape)) for t in stored.values()} == {(torch.int32, shape)}


@pytest.mark.parametrize("bos", [False, True])
def test_each_piece_is_a_stretch_of_one_document(tmp_path: Path, bos: bool) -> None:
    write(tmp_path, bos)
    owner = {
        ord(letter) - 0x4E00: document.source
        for document in unique_documents(many_lengths())
        for letter in document.text
    }
    for stage, (_, length) in WANTED.items():
        found = list(pieces(TrainingTokens(tmp_path / f"{stage}.safetensors")))
        assert {len(piece) == length for piece in found} == {True, False}
        for piece in found:
            if bos:
                assert piece.pop(0) == BOS_ID
            assert BOS_ID not in piece and len({owner[n] for n in piece}) <= 1
            assert all(b == a + 1 for a, b in pairwise(piece))


def test_a_stage_alone_has_the_sequences_that_pack_would_make_without_turns(
    tmp_path: Path,
) -> None:
    document = unique_documents([1000])
    write_training(tmp_path, letters(True), document, {"stage1": (60, 16)}, seed=3)
    packed = packing.pack(document, letters(True), 16, 60 * 16, seed=3, part="training")
    stored = load_tensors(tmp_path / "stage1.safetensors")
    assert torch.equal(stored["input_ids"].long(), packed.input_ids)
    assert torch.equal(stored["position_ids"].long(), packed.position_ids)


def test_documents_come_one_after_another(tmp_path: Path, plain: Tokenizer, docs: Docs) -> None:
    write_training(tmp_path, plain, docs(*[64] * 8), {"stage1": (16, 16)}, seed=0)
    rows = load_tensors(tmp_path / "stage1.safetensors")["input_ids"]
    owners = [row[0].item() for row in rows]
    assert all(len(set(owners[n : n + 4])) == 1 for n in range(0, 16, 4))
    assert len(set(owners)) == 4


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    hashes = []
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, seed=seed)
        hashes.append([hash_file(tmp_path / name / f"{stage}.safetensors") for stage in WANTED])
    one, same, other = hashes
    assert one == same
    assert all(a != b for a, b in zip(one, other, strict=True))


# No token twice.


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_no_token_is_seen_twice(tmp_path: Path, bos: bool, world_size: int) -> None:
    counts = seen(write(tmp_path, bos), world_size, RankedSequences)
    assert set(counts.values()) == {1}
    everything = sum(n * length for n, length in WANTED.values())
    assert 0.9 * everything <= counts.total() <= everything
    assert bos or counts.total() == everything


def test_devices_that_overlap_would_be_caught(tmp_path: Path) -> None:
    """The control: tokens that two devices see are found."""
    assert set(seen(write(tmp_path), 2, Overlapping).values()) == {2}


def test_stages_that_overlap_would_be_caught(tmp_path: Path) -> None:
    """The control: stages that are written each for itself begin with the same documents."""
    for stage, spec in WANTED.items():
        write(tmp_path, **{stage: spec})
    assert max(seen(tmp_path, 1, RankedSequences).values()) == 2


def test_the_next_stage_begins_with_the_next_document(
    tmp_path: Path, plain: Tokenizer, docs: Docs
) -> None:
    """Also where a stage ends within a document, or just at the end of one."""
    for number, expected in ((3, 2), (4, 2), (5, 1)):
        wanted = {"stage1": (number, 16), "stage2": (4, 16)}
        write_training(tmp_path, plain, docs(64, 64, 64), wanted, seed=0)
        first, second = (load_tensors(tmp_path / f"{s}.safetensors")["input_ids"] for s in wanted)
        assert not set(first.flatten().tolist()) & set(second.flatten().tolist())
        assert 3 - len(first.unique()) == expected and len(second.unique()) == 1


# Memory.


class Alive:
    """Counts how many of the tensors that it was shown are alive at once."""

    def __init__(self) -> None:
        self.now = self.most = self.all = 0

    def show(self, tensor: torch.Tensor) -> torch.Tensor:
        self.now += 1
        self.all += 1
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._gone)
        return tensor

    def _gone(self) -> None:
        self.now -= 1


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[str, Alive]:
    """What packing holds: the tokens of documents, and pieces; two sequences written at once."""
    counts = {"documents": Alive(), "pieces": Alive()}
    encode, pieces_of = packing.encode, packing.pieces_of

    def shown_documents(*args: Any) -> torch.Tensor:
        return counts["documents"].show(encode(*args))

    def shown_pieces(*args: Any) -> Iterator[torch.Tensor]:
        return map(counts["pieces"].show, pieces_of(*args))

    monkeypatch.setattr(packing, "encode", shown_documents)
    monkeypatch.setattr(training, "pieces_of", shown_pieces)
    monkeypatch.setattr(training, "TOKENS_AT_ONCE", 2 * 16)
    return counts


def test_memory_does_not_grow_with_tokens(
    tmp_path: Path, plain: Tokenizer, alive: dict[str, Alive]
) -> None:
    documents = [Document(f"{n:04}" * 20, f"d{n}") for n in range(100)]
    write_training(tmp_path, plain, documents, {"stage1": (400, 16), "stage2": (10, 16)}, seed=0)
    assert alive["documents"].all == 82 and alive["documents"].most <= 2
    assert alive["pieces"].all == 410 and alive["pieces"].most <= 4


def test_sequences_that_are_held_would_be_caught(
    tmp_path: Path, plain: Tokenizer, alive: dict[str, Alive], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: rows that are gathered before they are written."""
    monkeypatch.setattr(training, "TOKENS_AT_ONCE", 1 << 20)
    documents = [Document(f"{n:04}" * 20, f"d{n}") for n in range(100)]
    write_training(tmp_path, plain, documents, {"stage1": (400, 16)}, seed=0)
    assert alive["pieces"].most == 400


def test_opening_reads_nothing(tmp_path: Path) -> None:
    """A file of a terabyte, all of it a hole but the first sequence."""
    shape = (1 << 25, 1 << 12)
    path = tmp_path / "stage1.safetensors"
    names = ("input_ids", "position_ids")
    file = StreamedTensors(path, dict.fromkeys(names, (torch.int32, shape)))
    for name in names:
        file.append(name, torch.arange(1 << 12, dtype=torch.int32))
    size = file._base + file._end["position_ids"]
    file.close()
    with open(path, "r+b") as raw:
        raw.truncate(size)
    before = psutil.Process().memory_info().rss
    dataset = TrainingTokens(path)
    assert len(dataset) == 1 << 25
    assert torch.equal(dataset[0][0], torch.arange(1 << 12))
    assert dataset[len(dataset) - 1][1].sum() == 0
    assert psutil.Process().memory_info().rss - before < 32 << 20


# Reading.


def test_items(tmp_path: Path) -> None:
    dataset = TrainingTokens(write(tmp_path) / "stage2.safetensors")
    stored = load_tensors(tmp_path / "stage2.safetensors")
    assert len(dataset) == 12
    for n, (ids, positions) in enumerate(dataset):
        assert ids.dtype == positions.dtype == torch.long
        assert ids.shape == positions.shape == (64,)
        assert torch.equal(ids, stored["input_ids"][n])
        assert torch.equal(positions, stored["position_ids"][n])
    for wrong in (-1, 12):
        with pytest.raises(IndexError, match="of 12"):
            dataset[wrong]


def test_an_item_is_a_copy(tmp_path: Path) -> None:
    dataset = TrainingTokens(write(tmp_path) / "stage1.safetensors")
    before = items(dataset)
    for tensor in dataset[0]:
        tensor.zero_()
    assert items(dataset) == before == items(TrainingTokens(dataset.path))


def test_a_pickled_copy_opens_the_file_anew(tmp_path: Path) -> None:
    dataset = TrainingTokens(write(tmp_path) / "stage1.safetensors")
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert items(pickle.loads(pickled)) == items(dataset)
    dataset.path.unlink()
    with pytest.raises(TCError, match=r"stage1\.safetensors cannot be read"):
        pickle.loads(pickled)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_loader(tmp_path: Path, num_workers: int) -> None:
    dataset = TrainingTokens(write(tmp_path) / "stage2.safetensors")
    sampler = RankedSequences(12, SEQUENCES_A_STEP, 1, 2, seed=0)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=num_workers)
    batches = list(loader)
    assert len(batches) == len(loader) == 3
    got = [row.tolist() for ids, _ in batches for row in ids]
    assert got == [dataset[n][0].tolist() for n in sampler]


@pytest.mark.parametrize("content", [None, b"", b"nonsense" * 40, "short", "foreign"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: Any) -> None:
    path = write(tmp_path) / "stage1.safetensors"
    if content is None:
        path.unlink()
    elif content == "short":
        path.write_bytes(path.read_bytes()[:-1])
    elif content == "foreign":
        StreamedTensors(path, {"x": (torch.int32, (0,))}).close()
    else:
        path.write_bytes(content)
    with pytest.raises(TCError, match=r"stage1\.safetensors cannot be read as training tokens"):
        TrainingTokens(path)


# Who sees what, and when.


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def steps(sampler: RankedSequences, micro: int) -> list[list[int]]:
    """What a device sees of each step, gathered from a loader's batches of `micro`."""
    batches = [batch.tolist() for batch in DataLoader(range(10_000), micro, sampler=sampler)]
    each = sampler.share // micro
    return [joined(batches[n : n + each]) for n in range(0, len(batches), each)]


@pytest.mark.parametrize(("world_size", "micro"), [(1, 1), (1, 4), (2, 4), (2, 2), (4, 1), (8, 1)])
def test_a_step_sees_the_same_on_any_number_of_devices(world_size: int, micro: int) -> None:
    whole = steps(RankedSequences(80, 8, 0, 1, seed=5), micro=8)
    shares = [
        steps(RankedSequences(80, 8, r, world_size, seed=5), micro) for r in range(world_size)
    ]
    assert [joined(parts) for parts in zip(*shares, strict=True)] == whole
    assert sorted(joined(whole)) == list(range(80))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_resume_is_the_tail(world_size: int) -> None:
    for rank in range(world_size):
        whole = list(RankedSequences(83, 8, rank, world_size, seed=1))
        for step in range(11):
            resumed = RankedSequences(83, 8, rank, world_size, seed=1, start_step=step)
            assert list(resumed) == whole[step * 8 // world_size :]
            assert len(resumed) == len(list(resumed))


def test_resume_on_other_devices() -> None:
    """What two devices began four can end, with the steps that one would have made."""
    whole = steps(RankedSequences(80, 8, 0, 1, seed=2), 8)
    begun = [steps(RankedSequences(80, 8, r, 2, seed=2), 4)[:3] for r in range(2)]
    ended = [steps(RankedSequences(80, 8, r, 4, seed=2, start_step=3), 2) for r in range(4)]
    got = [joined(parts) for shares in (begun, ended) for parts in zip(*shares, strict=True)]
    assert got == whole


def test_a_wrong_resume_would_be_caught() -> None:
    """The control: one step more or less is another tail."""
    whole = list(RankedSequences(80, 8, 1, 2, seed=1))
    for step in (2, 4):
        assert list(RankedSequences(80, 8, 1, 2, seed=1, start_step=step)) != whole[3 * 4 :]


def test_order_follows_from_the_seed() -> None:
    one, same, other = (list(RankedSequences(64, 8, 0, 1, seed=s)) for s in (0, 0, 1))
    assert one == same != other
    assert one != sorted(one) and sorted(one) == sorted(other) == list(range(64))


def test_what_is_over_a_whole_step_is_not_used() -> None:
    assert len(list(RankedSequences(31, 8, 0, 1, seed=0))) == 24
    assert list(RankedSequences(7, 8, 0, 1, seed=0)) == []


def test_a_step_that_devices_cannot_share() -> None:
    with pytest.raises(TCError, match=r"batch_sequences=6 cannot be shared by 4 devices"):
        RankedSequences(60, 6, 0, 4, seed=0)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (10**9 + 1, 15625001)],
)
def test_tokens_are_rounded_up_to_whole_steps(tokens: int, expected: int) -> None:
    stage = RecoveryStageConfig(tokens=tokens, sequence_length=16, batch_sequences=4)
    assert steps_of(stage) == expected
    assert sequences_wanted(stage) == 4 * expected


# Too little text, and other errors.


@pytest.mark.parametrize("wanted", [{"stage1": (200, 16)}, {"stage1": (2, 16), "stage2": (40, 64)}])
def test_text_that_ends_before_the_budget(tmp_path: Path, wanted: dict[str, Any]) -> None:
    documents = unique_documents([100] * 20)
    needed = sum(n * length for n, length in wanted.values())
    with pytest.raises(TCError) as caught:
        write_training(tmp_path, letters(False), documents, wanted, seed=0)
    message = str(caught.value)
    given = int(message.split("documents give ")[1].split(" tokens")[0])
    assert 1800 <= given <= 2000 and f"{needed} are needed" in message
    assert all(f"recovery.{stage}.tokens=..." in message for stage in wanted)
    assert "raise data.shares.training" in message and "data.path=[...]" in message


@pytest.mark.parametrize("bos", [False, True])
def test_just_enough_text(tmp_path: Path, bos: bool) -> None:
    document = unique_documents([(16 - bos) * 8])
    write_training(tmp_path, letters(bos), document, {"stage1": (8, 16)}, seed=0)
    with pytest.raises(TCError, match="give 128 tokens, and 144 are needed"):
        write_training(tmp_path, letters(bos), document, {"stage1": (9, 16)}, seed=0)


def test_fewer_bytes_than_tokens_is_told_before_tokenising(
    tmp_path: Path, plain: Tokenizer, docs: Docs, alive: dict[str, Alive]
) -> None:
    wanted = {"stage1": (10, 16), "stage2": (10, 32)}
    with pytest.raises(TCError) as caught:
        write_training(tmp_path, plain, docs(100, 200), wanted, seed=0)
    message = str(caught.value)
    assert "have 300 bytes" in message and "480 are needed (stage1 160, stage2 320)" in message
    assert alive["documents"].all == 0 and list(tmp_path.iterdir()) == []


def test_no_text(tmp_path: Path, plain: Tokenizer) -> None:
    with pytest.raises(TCError, match="no text for the training"):
        write_training(tmp_path, plain, [Document(" \n", "x")], {"stage1": (1, 16)}, seed=0)


def test_too_short_sequences_are_all_named(tmp_path: Path, with_bos: Tokenizer, docs: Docs) -> None:
    wanted = {"stage1": (1, 2), "stage2": (1, 0)}
    with pytest.raises(TCError) as caught:
        write_training(tmp_path, with_bos, docs(99), wanted, seed=0)
    for stage, length in (("stage1", 2), ("stage2", 0)):
        assert f"recovery.{stage}.sequence_length={length} is too short" in str(caught.value)
