"""The searches themselves, over losses that anyone may provide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tc.config import PolicyKind
from tc.select.losses import Variant

Losses = Callable[[Sequence[Variant]], Sequence[float]]
"""The loss of each of some variants that differ in their last layer alone."""


@dataclass(frozen=True)
class Round:
    """Every layer on trial once.

    Attributes:
        base: the layers that were chosen before, in the order of their choice.
        start: the loss of the base.
        losses: the loss with one layer more, by layer.
        sign: 1 where a good layer lowers the loss, -1 where a needed one raises it.
    """

    base: Variant
    start: float
    losses: dict[int, float]
    sign: int = 1

    @property
    def scores(self) -> dict[int, float]:
        """What each layer is worth, in nats a token."""
        return {i: self.sign * (self.start - loss) for i, loss in self.losses.items()}

    def best(self, count: int) -> list[int]:
        """The layers of the highest scores, best first; of equals the lower layer."""
        scores = self.scores
        return sorted(scores, key=lambda i: (-scores[i], i))[:count]


def bypass_scores(losses: Losses, num_layers: int) -> Round:
    """A layer's score is the rise in the teacher's NLL where its attention is bypassed (`ar`)."""
    return _one_layer_each(losses, num_layers, -1)


def ga_s2_scores(losses: Losses, num_layers: int) -> Round:
    """A layer's score is the drop in KL from the student that keeps none where it alone is kept."""
    return _one_layer_each(losses, num_layers, 1)


def greedy_path(losses: Losses, num_layers: int, count: int) -> list[Round]:
    """Layers are added one by one, each the one that lowers the KL most.

    Args:
        losses: KL divergences of students, by the layers that they keep.
        num_layers: of the teacher.
        count: layers that are added.

    Returns:
        A round a layer; each one's base is the path so far.
    """
    rounds: list[Round] = []
    path: Variant = ()
    start = losses([()])[0]
    for _ in range(count):
        left = [i for i in range(num_layers) if i not in path]
        values = losses([(*path, i) for i in left])
        rounds.append(Round(path, start, dict(zip(left, values, strict=True))))
        best = rounds[-1].best(1)[0]
        path, start = (*path, best), rounds[-1].losses[best]
    return rounds


def search(
    kind: PolicyKind, losses: Losses, num_layers: int, count: int
) -> tuple[list[int], list[Round]]:
    """The layers that keep attention, ascending, and the rounds they come from.

    Args:
        kind: `ar`, `ga_s2` or `greedy`.
        losses: NLLs for `ar`, KL divergences for the others.
        num_layers: of the teacher.
        count: layers to choose, at least one.
    """
    if kind is PolicyKind.greedy:
        rounds = greedy_path(losses, num_layers, count)
        return sorted([*rounds[-1].base, *rounds[-1].best(1)]), rounds
    scores = bypass_scores if kind is PolicyKind.ar else ga_s2_scores
    only = scores(losses, num_layers)
    return sorted(only.best(count)), [only]


def num_scores(kind: PolicyKind, num_layers: int, count: int) -> int:
    """How many losses a search asks for."""
    rounds = count if kind is PolicyKind.greedy else 1
    return 1 + sum(num_layers - chosen for chosen in range(rounds))


def _one_layer_each(losses: Losses, num_layers: int, sign: int) -> Round:
    start = losses([()])[0]
    values = losses([(i,) for i in range(num_layers)])
    return Round((), start, dict(enumerate(values)), sign)
