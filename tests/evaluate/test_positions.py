"""Losses by position and by context length against whole logits, window by window."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from student_helpers import student, teacher
from transformers import PreTrainedModel

from tc.config import PositionsConfig
from tc.data import Document, nested_windows
from tc.errors import TCError
from tc.evaluate import perplexity, run_positions
from tc.evaluate.positions import edges, stretch_losses
from tc.teacher.untrained import byte_tokenizer

TOKENIZER = byte_tokenizer()
CONTEXTS = [16, 24, 64]


def texts(*lengths: int) -> list[Document]:
    draw = torch.Generator().manual_seed(2)
    letters = [torch.randint(97, 123, (n,), generator=draw).tolist() for n in lengths]
    return [Document(bytes(row).decode(), f"d{n}") for n, row in enumerate(letters)]


DOCUMENTS = texts(200, 63, 130, 64)
CFG = PositionsConfig(tokens=5 * 64, contexts=CONTEXTS, buckets=6, batch_tokens=100)


@torch.no_grad()
def losses_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Of each token but the first, from whole logits in float64."""
    logits = copy.deepcopy(model).double()(ids[None]).logits[0]
    return -logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def brute(model: PreTrainedModel, context: int, step: int) -> torch.Tensor:
    """Losses `[stretches, 63]`: each target where a window first reaches it, window by window."""
    rows = []
    for stretch in nested_windows(DOCUMENTS, TOKENIZER, 5, CONTEXTS, seed=0):
        ids, row, start = stretch[64][0].input_ids, [], 0
        while len(row) < 63:
            found = losses_of(model, ids[start : start + context])
            row += found[len(row) - start :].tolist()
            start += step
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_losses_equal_whole_logits(context: int, batch: int) -> None:
    model = student("llama")
    stretches = nested_windows(DOCUMENTS, TOKENIZER, 5, CONTEXTS, seed=0)
    got = stretch_losses(model, stretches, context, batch)
    torch.testing.assert_close(got, brute(model, context, context - 1), rtol=1e-4, atol=1e-4)
    if context < 64:  # the control: windows that start elsewhere give other losses
        with pytest.raises(AssertionError):
            other = brute(model, context, context - 2)
            torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-4)


def test_positions_average_to_the_perplexity_of_the_longest_context() -> None:
    model = teacher("qwen3")
    results = run_positions(model, TOKENIZER, DOCUMENTS, CFG, seed=0)
    stretches = nested_windows(DOCUMENTS, TOKENIZER, 5, CONTEXTS, seed=0)
    plain = perplexity(model, [s[64][0] for s in stretches], batch_sequences=2)
    by_position = [r for r in results if r.position is not None]
    samples = sum(r.samples for r in by_position)
    mean = sum(r.value * r.samples for r in by_position) / samples
    assert samples == plain.tokens == 5 * 63
    assert mean == pytest.approx(plain.nll, rel=1e-9)
    longest = {r.metric: r for r in results if r.context == 64 and r.position is None}
    assert longest["nll"].value == pytest.approx(plain.nll, rel=1e-9)
    assert longest["nll"].stderr == pytest.approx(plain.nll_stderr, rel=1e-9)
    assert longest["perplexity"].value == pytest.approx(math.exp(plain.nll), rel=1e-9)


def test_every_context_counts_the_same_text() -> None:
    model = teacher("llama")
    results = run_positions(model, TOKENIZER, DOCUMENTS, CFG, seed=0)
    found = {r.context: r for r in results if r.metric == "nll" and r.position is None}
    assert list(found) == CONTEXTS
    assert {r.samples for r in found.values()} == {5 * 63}
    for context, result in found.items():
        want = float(brute(model, context, context - 1).mean())
        assert result.value == pytest.approx(want, rel=1e-5)
    assert len({r.value for r in found.values()}) == 3


def test_error_of_a_bucket_is_over_stretches() -> None:
    model = teacher("llama")
    results = run_positions(model, TOKENIZER, DOCUMENTS, CFG, seed=0)
    starts = [r.position for r in results if r.position is not None]
    losses = brute(model, 64, 63)
    for result, end in zip(results[-len(starts) :], [*starts[1:], 64], strict=True):
        means = losses[:, result.position - 1 : end - 1].mean(1)
        assert result.value == pytest.approx(float(means.mean()), rel=1e-5)
        assert result.stderr == pytest.approx(float(means.std() / 5**0.5), rel=1e-3)


def test_edges() -> None:
    assert edges(2048, PositionsConfig()) == [2**n for n in range(12)]
    assert edges(10, PositionsConfig(width=4)) == [1, 5, 9, 10]
    assert edges(8, PositionsConfig(buckets=50)) == list(range(1, 9))
    assert edges(64, PositionsConfig(buckets=1), first=2) == [2, 64]


def test_progress_and_batches() -> None:
    told: list[tuple[int, int]] = []
    model = teacher("llama")
    run_positions(model, TOKENIZER, DOCUMENTS, CFG, 0, lambda *seen: told.append(seen))
    total = 3 * 5 * 63
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert len(told) == math.ceil(25 / 6) + math.ceil(15 / 4) + 5


def test_too_little_long_text() -> None:
    cfg = PositionsConfig(tokens=7 * 64, contexts=CONTEXTS)
    with pytest.raises(TCError, match=r"have 6 stretches of 64 tokens, and 7 are needed"):
        run_positions(teacher("llama"), TOKENIZER, DOCUMENTS, cfg, seed=0)


def test_a_context_beyond_the_models_window_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = copy.deepcopy(teacher("llama"))
    run_positions(model, TOKENIZER, DOCUMENTS, CFG, seed=0)
    assert not caplog.records
    model.config.max_position_embeddings = 63
    run_positions(model, TOKENIZER, DOCUMENTS, CFG, seed=0)
    assert "the model's own window is 63" in caplog.text
