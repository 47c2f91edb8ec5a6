"""The searches, against plain ones that build every student."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
from select_helpers import mixers, packed, plain_kl, plain_nll, teacher

from tc.config import PolicyKind
from tc.select import (
    BypassLoss,
    HybridLoss,
    Loss,
    Round,
    Variant,
    bypass_scores,
    ga_s2_scores,
    greedy_path,
    num_scores,
    search,
)


class Losses:
    """One loss after another; what was asked for is noted."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.asked = loss, []

    def __call__(self, variants: Sequence[Variant]) -> list[float]:
        self.asked += variants
        return [self.loss(variant) for variant in variants]


def test_greedy_is_the_plain_search() -> None:
    model, tokens = teacher(), packed()
    path: tuple[int, ...] = ()
    for _ in range(4):
        left = {i: plain_kl(model, (*path, i), tokens) for i in range(4) if i not in path}
        path = (*path, min(left, key=left.__getitem__))
    rounds = greedy_path(Losses(HybridLoss(model, mixers(model), tokens)), 4, 4)
    found = [found.best(1)[0] for found in rounds]
    assert tuple(found) == path
    assert [found.base for found in rounds] == [path[:n] for n in range(4)]
    for one in rounds:
        assert one.start == pytest.approx(plain_kl(model, one.base, tokens), abs=1e-5)
    # Wrong on purpose: the order that one-layer scores alone give is not the path.
    assert rounds[0].best(4) != found


def test_ga_s2_is_the_plain_drop_in_kl() -> None:
    model, tokens = teacher("random_qwen3"), packed()
    none = plain_kl(model, (), tokens)
    want = {i: none - plain_kl(model, (i,), tokens) for i in range(4)}
    got = ga_s2_scores(Losses(HybridLoss(model, mixers(model), tokens)), 4)
    assert got.scores == pytest.approx(want, abs=1e-5)
    assert got.best(4) == sorted(want, key=lambda i: -want[i])
    assert {i: got.start + got.losses[i] for i in range(4)} != pytest.approx(want, abs=1e-5)


def test_ar_is_the_plain_rise_in_nll() -> None:
    model, tokens = teacher("random_qwen2"), packed()
    none = plain_nll(model, (), tokens)
    want = {i: plain_nll(model, (i,), tokens) - none for i in range(4)}
    got = bypass_scores(Losses(BypassLoss(model, tokens)), 4)
    assert got.scores == pytest.approx(want, abs=1e-5)
    assert got.best(4) == sorted(want, key=lambda i: -want[i])
    assert {i: -score for i, score in got.scores.items()} != pytest.approx(want, abs=1e-5)


def test_greedy_asks_for_what_single_scores_do_not_see() -> None:
    """Two layers that do the same work: one of them alone is enough."""
    worth = {0: 4.0, 1: 3.9, 2: 1.0}

    def loss(kept: Variant) -> float:
        gain = max((worth[i] for i in kept if i < 2), default=0) + (2 in kept)
        return 5 - gain

    assert search(PolicyKind.ga_s2, Losses(loss), 3, 2)[0] == [0, 1]
    assert search(PolicyKind.greedy, Losses(loss), 3, 2)[0] == [0, 2]


@pytest.mark.parametrize("order", list(permutations([3.0, 2.0, 1.0])))
def test_the_highest_scores_are_kept(order: tuple[float, ...]) -> None:
    wanted = sorted(sorted(range(3), key=lambda i: -order[i])[:2])
    kept, rounds = search(PolicyKind.ar, Losses(lambda v: order[v[0]] if v else 0.5), 3, 2)
    assert kept == wanted and rounds[0].sign == -1
    lowest = sorted(sorted(range(3), key=lambda i: order[i])[:2])
    assert search(PolicyKind.ga_s2, Losses(lambda v: order[v[0]] if v else 4), 3, 2)[0] == lowest


def test_of_equal_layers_the_lower_one_is_kept() -> None:
    assert Round((), 1.0, {2: 0.5, 0: 0.5, 1: 0.7}).best(2) == [0, 2]


@pytest.mark.parametrize("kind", [PolicyKind.ar, PolicyKind.ga_s2, PolicyKind.greedy])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_as_many_losses_as_announced(kind: PolicyKind, count: int) -> None:
    losses = Losses(lambda kept: 1 - 0.1 * sum(kept))
    kept, _ = search(kind, losses, 4, count)
    assert len(losses.asked) == len(set(losses.asked)) == num_scores(kind, 4, count)
    assert len(kept) == count and kept == sorted(kept)
