"""lm-eval on a model and a tokenizer in memory.

Everything here needs lm-eval, whose import takes seconds: import this module where it is used.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval.tasks
import numpy as np
import torch
from lm_eval.api import metrics
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Told how many answers there are so far, and how many there will be."""

TASKS_FOLDER = Path(lm_eval.tasks.__file__).parent
"""Where lm-eval keeps its task files."""

DRAWS = 1000
"""Draws of a bootstrapped standard error, which perplexity's is; that of a mean is exact."""


class Scorer(HFLM):
    """lm-eval's own backend, with one progress for all in place of its bars.

    Args:
        model: a causal LM in evaluation mode.
        tokenizer: its tokenizer; it is copied, as lm-eval may give it a pad token.
        batch_size: sequences in one forward pass.
        progress: see `Progress`.
        max_length: the longest sequence, None for what the model's config says.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        progress: Progress = lambda done, total: None,
        max_length: int | None = None,
    ) -> None:
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),
            batch_size=batch_size,
            max_length=max_length,
        )
        self.restart(progress)
        # lm-eval tells this hook of each answer.
        self.set_cache_hook(self)

    def restart(self, progress: Progress) -> None:
        """Counts answers anew, and tells another of them."""
        self.progress, self.done, self.total = progress, 0, 0

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """Counts an answer."""
        self.done += 1
        self.progress(self.done, self.total)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        """The log-likelihoods of continuations."""
        self.total += len(requests)
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        """The log-likelihoods of whole texts."""
        self.total += len(requests)
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        """Greedy continuations."""
        self.total += len(requests)
        return super().generate_until(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> Any:
        long = sum(len(ctx) + len(cont) > self.max_length + 1 for _, ctx, cont in requests)
        self._warn(long, len(requests))
        return super()._loglikelihood_tokens(requests, **kwargs)

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> Any:
        """The tokens of prompts and which of them are not padding."""
        ids, mask = super().tok_batch_encode(strings, padding_side, truncation=truncation)
        kept = left_truncate_len or ids.shape[1]
        self._warn(int((mask.sum(1) > kept).sum()), len(strings))
        return ids[:, -kept:], mask[:, -kept:]

    def _warn(self, long: int, number: int) -> None:
        """Says what lm-eval would only log."""
        if long:
            log.warning(
                "%d of %d requests are longer than the model's %d tokens; as lm-eval does, they "
                "lose their beginning",
                *(long, number, self.max_length),
            )


def scores(scorer: Scorer, loaded: dict[str, Any], limit: int | None, samples: bool) -> Any:
    """Runs loaded tasks.

    Args:
        scorer: the model.
        loaded: `tasks` and `groups` by name, as lm-eval's `TaskManager` loads them.
        limit: the first so many documents of each task, None for all.
        samples: whether the score of each document is wanted.

    Returns:
        lm-eval's results.
    """
    with quiet():
        return evaluate(scorer, loaded, limit=limit, bootstrap_iters=DRAWS, log_samples=samples)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps lm-eval's log and bars from the screen, and its bootstrap from worker processes."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "transformers", "httpx")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with (
            contextlib.redirect_stderr(io.StringIO()),
            mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"),
            mock.patch.object(metrics, "print", lambda *given: None, create=True),
        ):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators that lm-eval draws from, and puts them back afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
