"""A whole text's perplexity against the plain loop that papers use."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from student_helpers import student, teacher
from transformers import PreTrainedModel

from tc.config import CorpusConfig
from tc.data import Document, read_file
from tc.errors import TCError
from tc.evaluate import corpus, run_corpus
from tc.evaluate.corpus import label, read_corpus
from tc.teacher.untrained import byte_tokenizer

ROWS = ["", " = Valkyria Chronicles = \n", "", "The game began development in 2010 . \n", "end\n"]
TEXT = "\n\n".join(ROWS)
TOKENIZER = byte_tokenizer()


def written(folder: Path, suffix: str) -> Path:
    path = folder / f"wiki{suffix}"
    if suffix == ".txt":
        path.write_text(TEXT)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    else:
        pq.write_table(pa.table({"text": ROWS}), path)
    return path


def config(path: Path, **values) -> CorpusConfig:
    return CorpusConfig(path=str(path), **{"context": 16, **values})


@torch.no_grad()
def plain_loop(model: PreTrainedModel, ids: torch.Tensor, length: int, tail: bool = False) -> float:
    """Mean loss over windows without overlap; `tail` counts the last short one, which is wrong."""
    model, losses = copy.deepcopy(model).double(), []
    for i in range(len(ids) // length + tail):
        batch = ids[None, i * length : (i + 1) * length]
        logits = model(batch).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], batch[0, 1:], reduction="none")
        losses += loss.tolist()
    return sum(losses) / len(losses)


def values(model: PreTrainedModel, cfg: CorpusConfig) -> dict[str, float]:
    return {r.metric: r.value for r in run_corpus(model, TOKENIZER, cfg, seed=0)}


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_files_of_every_kind_give_one_text(suffix: str, tmp_path: Path) -> None:
    cfg = config(written(tmp_path, suffix))
    assert read_corpus(cfg) == TEXT
    assert label(cfg) == "wiki"


@pytest.mark.parametrize("context", [7, 16, 31])
@pytest.mark.parametrize("batch", [1, 3])
def test_equals_the_plain_loop_with_odd_ends(context: int, batch: int, tmp_path: Path) -> None:
    model, ids = student("llama"), torch.tensor(TOKENIZER(TEXT).input_ids)
    assert len(ids) % context > 1
    cfg = config(written(tmp_path, ".txt"), context=context, batch_sequences=batch)
    results = {r.metric: r for r in run_corpus(model, TOKENIZER, cfg, seed=0)}
    want = plain_loop(model, ids, context)
    assert results["nll"].value == pytest.approx(want, rel=1e-5)
    assert results["perplexity"].value == pytest.approx(math.exp(want), rel=1e-4)
    assert results["perplexity"].samples == len(ids) // context * (context - 1)
    assert results["perplexity"].context == context
    assert results["nll"].value != pytest.approx(plain_loop(model, ids, context, True), rel=1e-5)


def test_words_and_bytes_share_the_loss(tmp_path: Path) -> None:
    found = values(teacher("llama"), config(written(tmp_path, ".txt")))
    size, words = len(TEXT.encode()), len(TEXT.split())
    # One token a byte.
    assert found["byte_perplexity"] == pytest.approx(found["perplexity"], rel=1e-9)
    assert found["bits_per_byte"] == pytest.approx(found["nll"] / math.log(2), rel=1e-9)
    assert math.log(found["word_perplexity"]) == pytest.approx(
        found["nll"] * size / words, rel=1e-9
    )


def test_tokens_are_those_of_the_beginning(tmp_path: Path) -> None:
    model, path = teacher("llama"), written(tmp_path, ".txt")
    ids = torch.tensor(TOKENIZER(TEXT).input_ids)
    found = values(model, config(path, tokens=40))
    assert found["nll"] == pytest.approx(plain_loop(model, ids[:40], 16), rel=1e-5)
    assert found["nll"] != values(model, config(path))["nll"]


def test_special_tokens_stand_at_the_text_s_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def starts_with_bos(text: str, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [256, *TOKENIZER(text).input_ids]}

    def records(model, windows, *args):
        seen.extend(windows)
        raise KeyboardInterrupt

    monkeypatch.setattr("tc.evaluate.corpus.perplexity", records)
    with pytest.raises(KeyboardInterrupt):
        run_corpus(teacher("llama"), starts_with_bos, config(written(tmp_path, ".txt")), seed=0)
    assert torch.cat([w.input_ids for w in seen]).tolist().count(256) == 1
    assert seen[0].input_ids[0] == 256
    assert all(w.counted.tolist() == [False] + [True] * 15 for w in seen)


def test_what_cannot_be_measured_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, ".txt")
    with pytest.raises(TCError, match=r"less than one window of eval.corpus.context=2048"):
        run_corpus(teacher("llama"), TOKENIZER, config(path, context=2048), seed=0)
    path.write_text(" \n")
    with pytest.raises(TCError, match="has no text in it"):
        read_corpus(config(path))
    with pytest.raises(TCError, match="no column 'body'; there are: text"):
        read_corpus(config(written(tmp_path, ".parquet"), text_column="body"))


@pytest.fixture(autouse=True)
def _unread() -> None:
    corpus._of_file.cache_clear()
    corpus._of_hub.cache_clear()


def test_a_text_is_read_once_and_again_where_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def reads(path: Path, column: str) -> list[Document]:
        read.append(path)
        return read_file(path, column)

    monkeypatch.setattr("tc.evaluate.corpus.read_file", reads)
    path = written(tmp_path, ".txt")
    assert read_corpus(config(path)) == read_corpus(config(path, context=31)) == TEXT
    assert len(read) == 1
    path.write_text("another text")
    assert read_corpus(config(path)) == "another text"
    assert len(read) == 2


def test_the_hub_is_asked_for_one_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return {"text": ROWS}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert read_corpus(CorpusConfig()) == TEXT
    args, options = asked[0]
    assert args == ("Salesforce/wikitext", "wikitext-2-raw-v1")
    assert options["split"] == "test" and len(options["revision"]) == 40
    assert label(CorpusConfig()) == "wikitext-2-raw-v1"


def test_without_a_hub_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args, **options):
        raise ConnectionError("Couldn't reach the Hub\nand more")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(
        TCError, match=r"Couldn't reach the Hub\n.*eval.corpus.path=/folder"
    ) as error:
        read_corpus(CorpusConfig())
    assert "and more" not in str(error.value)
