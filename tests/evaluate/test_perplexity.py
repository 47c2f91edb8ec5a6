"""Perplexity against whole logits in float64, token by token."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tc.config import TeacherConfig, TeacherSource
from tc.data import Document, Window, windows
from tc.errors import TCError
from tc.evaluate import perplexity
from tc.teacher import load_teacher

# The package's function of the same name hides the module.
module = sys.modules["tc.evaluate.perplexity"]

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def teacher(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, object]:
    cfg = TeacherConfig(
        name="t", source=TeacherSource.random, architecture="llama", model=dict(SIZES)
    )
    made = load_teacher(cfg, Path())
    return made.model.to(dtype), made.tokenizer


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return teacher()[0]


def some_windows(*lengths: int) -> list[Window]:
    """Windows of random tokens; a third of the targets, at random, do not count."""
    draw = torch.Generator().manual_seed(5)
    made = []
    for length in lengths:
        counted = torch.rand(length, generator=draw) > 0.3
        counted[0] = False
        made.append(Window(torch.randint(0, 256, (length,), generator=draw), counted))
    return made


WINDOWS = some_windows(40, 7, 23, 40, 31)


@torch.no_grad()
def losses(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each token but the first, from whole logits in float64."""
    logits = copy.deepcopy(model).double()(ids[None]).logits[0]
    return torch.stack([-logits[t - 1].log_softmax(-1)[ids[t]] for t in range(1, len(ids))])


def brute(model: PreTrainedModel, given: list[Window], shift: int = 0) -> list[list[float]]:
    """The losses that count, by window; `shift` counts wrong ones on purpose."""
    return [losses(model, w.input_ids)[w.counted[1:].roll(shift)].tolist() for w in given]


def mean(clusters: list[list[float]]) -> float:
    flat = [x for cluster in clusters for x in cluster]
    return sum(flat) / len(flat)


def test_equals_whole_logits(model) -> None:
    got, clusters = perplexity(model, WINDOWS, batch_sequences=2), brute(model, WINDOWS)
    assert got.nll == pytest.approx(mean(clusters), rel=1e-6)
    assert got.perplexity == pytest.approx(math.exp(mean(clusters)), rel=1e-5)
    assert (got.tokens, got.windows) == (sum(map(len, clusters)), len(WINDOWS))
    assert got.nll != pytest.approx(mean(brute(model, WINDOWS, shift=1)), rel=1e-3)


@pytest.mark.parametrize("rows", [1, 7, 512])
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_batches_and_blocks_of_logits_change_nothing(model, monkeypatch, batch, rows) -> None:
    want = perplexity(model, WINDOWS, batch_sequences=2)
    monkeypatch.setattr(module, "ROWS", rows)
    told: list[int] = []
    got = perplexity(model, WINDOWS, batch, told.append)
    assert got.nll == pytest.approx(want.nll, rel=1e-6)
    assert got.nll_stderr == pytest.approx(want.nll_stderr, rel=1e-4)
    assert (got.tokens, got.windows) == (want.tokens, want.windows)
    assert sum(told) == want.tokens and len(told) == math.ceil(len(WINDOWS) / batch)


def test_standard_error_is_that_of_a_ratio(model) -> None:
    """sqrt(n / (n - 1) sum (s_i - r c_i)^2) / sum c_i over windows of c_i tokens and loss s_i."""
    clusters, got = brute(model, WINDOWS), perplexity(model, WINDOWS, batch_sequences=2)
    n, tokens, r = len(clusters), sum(map(len, clusters)), mean(clusters)
    residuals = [sum(c) - r * len(c) for c in clusters]
    want = math.sqrt(n / (n - 1) * sum(e * e for e in residuals)) / tokens
    assert got.nll_stderr == pytest.approx(want, rel=1e-4)


def test_standard_error_covers_the_truth_as_often_as_it_says() -> None:
    """On clusters with effects of their own, from a known mean: |z| < 2 in about 95% of draws."""
    draw = torch.Generator().manual_seed(0)
    hits, wrong, trials = 0, 0, 400
    for _ in range(trials):
        counts = torch.randint(5, 60, (40,), generator=draw)
        level = 3 + torch.randn(40, generator=draw, dtype=torch.float64)
        result = module.summary(level * counts, counts)
        hits += abs(result.nll - 3) < 2 * result.nll_stderr
        # Wrong on purpose: tokens taken for independent draws.
        flat = level.repeat_interleave(counts)
        wrong += abs(result.nll - 3) < 2 * float(flat.std()) / math.sqrt(len(flat))
    assert 0.9 < hits / trials < 0.99 and wrong / trials < 0.6


def test_one_window_has_no_spread(model) -> None:
    assert perplexity(model, WINDOWS[:1], batch_sequences=1).nll_stderr == pytest.approx(0)


@pytest.mark.parametrize(("context", "stride"), [(20, 7), (20, 19), (64, 64)])
def test_overlapping_windows_count_each_token_once(context: int, stride: int) -> None:
    model, tokenizer = teacher()
    text = "".join(chr(97 + (i * i + i // 3) % 26) for i in range(90))
    ids = torch.tensor(tokenizer(text).input_ids)
    given = windows([Document(text, "d")], tokenizer, 89, context, stride, seed=0)
    got = perplexity(model, given, batch_sequences=3)
    # Each token is predicted in the first window that reaches it.
    step, want = min(stride, context - 1), []
    for t in range(1, len(ids)):
        start = next(s for s in range(0, len(ids), step) if s + context > t)
        want.append(float(losses(model, ids[start : t + 1])[-1]))
    assert got.tokens == 89 == len(want)
    assert got.nll == pytest.approx(sum(want) / 89, rel=1e-6)


def test_a_uniform_model_is_as_perplexed_as_its_vocabulary_is_large() -> None:
    model, _ = teacher()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    got = perplexity(model, WINDOWS, batch_sequences=2)
    assert got.perplexity == pytest.approx(model.config.vocab_size, rel=1e-6)
    assert got.nll_stderr == pytest.approx(0, abs=1e-6)


def test_half_precision_losses_are_taken_in_float32() -> None:
    model, _ = teacher(torch.bfloat16)
    got = perplexity(model, WINDOWS, batch_sequences=1)
    assert got.nll == pytest.approx(mean(brute(model, WINDOWS)), rel=0.02)
    assert isinstance(got.to_dict()["perplexity"], float)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_an_error(value: float) -> None:
    model, _ = teacher()
    model.model.norm.weight[3] = value
    with pytest.raises(TCError, match="NaN or infinite losses"):
        perplexity(model, WINDOWS, batch_sequences=2)


def test_contents_of_pads_do_not_count(model) -> None:
    """A short window gives the same losses beside a long one as alone."""
    long, short = WINDOWS[0], WINDOWS[1]
    both = perplexity(model, [long, short], batch_sequences=2)
    apart = [perplexity(model, [w], batch_sequences=1) for w in (long, short)]
    assert both.nll * both.tokens == pytest.approx(sum(p.nll * p.tokens for p in apart), rel=1e-6)
