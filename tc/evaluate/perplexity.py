"""Perplexity of a causal LM on held-out windows.

Shape letters: B batch, T tokens, W vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel

from tc.data import Window, collate
from tc.errors import TCError
from tc.evaluate.results import Result

ROWS = 512
"""Tokens whose logits are turned to losses at once."""


@dataclass
class Perplexity:
    """A token-level perplexity.

    Attributes:
        perplexity: exp of the mean negative log-likelihood per counted token.
        nll: that mean, in nats.
        nll_stderr: its standard error over windows, each a cluster of tokens.
        tokens: counted tokens.
        windows: windows they stand in.
    """

    perplexity: float
    nll: float
    nll_stderr: float
    tokens: int
    windows: int

    def to_dict(self) -> dict[str, float | int]:
        """The fields as plain values."""
        return asdict(self)

    def results(self, measure: str, task: str, context: int) -> list[Result]:
        """The perplexity and the mean in the long format."""
        # The error of a mean log-likelihood is a relative error of its exponential.
        values = {
            "perplexity": (self.perplexity, self.perplexity * self.nll_stderr),
            "nll": (self.nll, self.nll_stderr),
        }
        return [
            Result(measure, task, metric, value, stderr, self.tokens, context)
            for metric, (value, stderr) in values.items()
        ]


def perplexity(
    model: PreTrainedModel,
    windows: list[Window],
    batch_sequences: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Perplexity:
    """Measures a model on windows; sums are float64.

    Args:
        model: a causal LM in evaluation mode.
        windows: tokens, and which of them count.
        batch_sequences: windows in a forward pass; but for rounding the result does not depend on
            it.
        progress: told how many counted tokens each step has done.

    Raises:
        TCError: if a loss is not finite.
    """
    sums, counts = [], []
    for losses, counted in counted_losses(model, windows, batch_sequences):
        sums.append(losses.sum(1))
        counts.append(counted.sum(1))
        progress(int(counted.sum()))
    return summary(torch.cat(sums), torch.cat(counts))


def counted_losses(
    model: PreTrainedModel, windows: list[Window], batch_sequences: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each batch of windows, losses `[B, T - 1]` that are 0 where none counts, and which do."""
    for start in range(0, len(windows), batch_sequences):
        batch = collate(windows[start : start + batch_sequences], pad_id=0)
        counted = batch["counted"][:, 1:]
        yield torch.where(counted, _losses(model, batch), 0), counted


@torch.no_grad()
def _losses(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Negative log-likelihoods `[B, T - 1]`, float64, of each token but the first."""
    ids, mask = (batch[name].to(model.device) for name in ("input_ids", "attention_mask"))
    hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    hidden, targets = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    parts = [
        torch.nn.functional.cross_entropy(model.lm_head(h).float(), t, reduction="none")
        for h, t in zip(hidden.split(ROWS), targets.split(ROWS), strict=True)
    ]
    return torch.cat(parts).double().cpu().view(len(ids), -1)


def summary(sums: torch.Tensor, counts: torch.Tensor) -> Perplexity:
    """The perplexity of clusters of tokens.

    Args:
        sums: of the counted losses of each cluster, float64.
        counts: of its counted tokens.

    Raises:
        TCError: if a loss is not finite.
    """
    tokens = int(counts.sum())
    nll = float(sums.sum()) / tokens
    if not math.isfinite(nll):
        raise TCError(
            "the model gives NaN or infinite losses on held-out text; its weights or activations "
            "overflow. Try teacher.dtype=float32."
        )
    # Ratio estimator over clusters: windows are independent draws, tokens of one are not.
    residuals = sums - nll * counts.double()
    spread = residuals.square().sum() * len(sums) / max(1, len(sums) - 1)
    return Perplexity(math.exp(nll), nll, float(spread.sqrt()) / tokens, tokens, len(sums))
