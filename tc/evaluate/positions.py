"""Loss by position in the context, and perplexity by its length, on the same held-out text.

What a student forgets shows in both: a model that uses its context predicts later tokens better,
and gains from a longer one.

Shape letters: N stretches of text, T tokens of the longest context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tc.config import PositionsConfig
from tc.data import Document, Window, nested_windows
from tc.evaluate.perplexity import Perplexity, counted_losses, summary
from tc.evaluate.results import Result, adding_up, warn_beyond

Stretches = list[dict[int, list[Window]]]


def run_positions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: list[Document],
    cfg: PositionsConfig,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Result]:
    """Measures a model at every position of long windows, and at several context lengths.

    Args:
        model: a causal LM in evaluation mode.
        tokenizer: of the teacher.
        documents: of the evaluation part.
        cfg: how long and how much.
        seed: of the order of documents.
        progress: told how many tokens have been counted, and how many will be.

    Returns:
        `perplexity` and `nll` for each context, all over the same targets; and `nll` for each
        bucket of positions in the longest, `position` being the first of it: a target's position
        is the number of tokens before it in its window.

    Raises:
        TCError: if the documents are too few or too short, or a loss is not finite.
    """
    stretches = nested_windows(
        documents, tokenizer, cfg.tokens // max(cfg.contexts), cfg.contexts, seed
    )
    warn_beyond(model, "positions", max(cfg.contexts))
    total = sum(int(w.counted.sum()) for s in stretches for cut in s.values() for w in cut)
    advance = adding_up(progress, total)
    results, by_position = [], torch.empty(0)
    for context in cfg.contexts:
        batch = max(1, cfg.batch_tokens // context)
        losses = stretch_losses(model, stretches, context, batch, advance)
        results += _mean(losses).results("positions", "held_out", context)
        if context == max(cfg.contexts):
            by_position = losses
    return results + _by_position(by_position, max(cfg.contexts), cfg)


def stretch_losses(
    model: PreTrainedModel,
    stretches: Stretches,
    context: int,
    batch_sequences: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> torch.Tensor:
    """The losses of every stretch's targets in their order, float64 `[N, targets]`.

    Args:
        model: a causal LM in evaluation mode.
        stretches: of one length each.
        context: which of their cuts.
        batch_sequences: windows in one forward pass.
        progress: told how many targets each step has done.
    """
    windows = [window for stretch in stretches for window in stretch[context]]
    found = []
    for losses, counted in counted_losses(model, windows, batch_sequences):
        found.append(losses[counted])
        progress(int(counted.sum()))
    return torch.cat(found).view(len(stretches), -1)


def edges(context: int, cfg: PositionsConfig, first: int = 1) -> list[int]:
    """Where buckets of the positions `first` to `context - 1` begin, and at last `context`."""
    if cfg.width is not None:
        return [*range(first, context, cfg.width), context]
    spaced = torch.logspace(0, 1, cfg.buckets + 1, base=context / first, dtype=torch.float64)
    return sorted({first, context, *(first * spaced).round().long().tolist()})


def _by_position(losses: torch.Tensor, context: int, cfg: PositionsConfig) -> list[Result]:
    first = context - losses.shape[1]  # the tokens in front of the first target
    starts = edges(context, cfg, first)
    results = []
    for start, end in pairwise(starts):
        found = _mean(losses[:, start - first : end - first])
        nll = found.results("positions", "held_out", context)[1]
        results.append(replace(nll, position=start))
    return results


def _mean(losses: torch.Tensor) -> Perplexity:
    """The mean of losses `[N, targets]`, each row a cluster."""
    return summary(losses.sum(1), torch.full((len(losses),), losses.shape[1]))
