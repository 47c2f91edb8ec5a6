"""Losses that processes share: whole or not there, resumable, the same by any number of workers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tc.artifacts import MANIFEST, read_manifest
from tc.config import PolicyKind
from tc.errors import TCError
from tc.select import SharedLosses, Variant, greedy_path, num_scores

FACTS = {"teacher": "x", "tokens": "y"}
ROUND = [(i,) for i in range(6)]


class Counted:
    """A loss that notes what it was asked for, and stops at the n-th."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.made: list[Variant] = []
        self.stop_at = stop_at

    def __call__(self, kept: Variant) -> float:
        if len(self.made) == self.stop_at:
            raise KeyboardInterrupt
        self.made.append(kept)
        return 10.0 - sum(0.9**i * (i + 1) % 3 for i in kept)


def shared(folder: Path, loss: Counted, worker: int = 0, workers: int = 1) -> SharedLosses:
    return SharedLosses(folder, FACTS, lambda: loss, worker, workers)


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    first, second = Counted(), Counted()
    want = shared(tmp_path / "a", first)(ROUND)
    assert want == [Counted()(variant) for variant in ROUND] and first.made == ROUND
    assert shared(tmp_path / "a", second)(ROUND) == want and second.made == []
    assert shared(tmp_path / "b", second)(ROUND) == want and second.made == ROUND


def test_nothing_is_loaded_where_nothing_lacks(tmp_path: Path) -> None:
    shared(tmp_path / "a", Counted())(ROUND)

    def load() -> Counted:
        raise AssertionError("loaded")

    SharedLosses(tmp_path / "a", FACTS, load)(ROUND)
    with pytest.raises(AssertionError, match="loaded"):
        SharedLosses(tmp_path / "a", FACTS, load)([(9,)])


def test_a_killed_selection_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = greedy_path(shared(tmp_path / "whole", Counted()), 5, 3)
    killed, rest, all_of_it = Counted(stop_at=8), Counted(), Counted()
    with pytest.raises(KeyboardInterrupt):
        greedy_path(shared(tmp_path / "a", killed), 5, 3)
    assert len(killed.made) == len(list((tmp_path / "a").glob("[!m]*.json"))) == 8
    assert greedy_path(shared(tmp_path / "a", rest), 5, 3) == whole
    greedy_path(shared(tmp_path / "b", all_of_it), 5, 3)
    assert killed.made + rest.made == all_of_it.made


def test_a_worker_does_its_own_and_then_what_lacks(tmp_path: Path) -> None:
    one, two = Counted(), Counted()
    (tmp_path / "alone").mkdir()
    shared(tmp_path / "alone", one, worker=1, workers=3)(ROUND)
    assert one.made == [(1,), (4,), (5,), (3,), (2,), (0,)]
    shared(tmp_path / "half", Counted(), worker=0, workers=2)([(0,), (2,), (4,)])
    shared(tmp_path / "half", two, worker=1, workers=2)(ROUND)
    assert two.made == [(1,), (3,), (5,)]


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_find_what_one_would(tmp_path: Path, workers: int) -> None:
    """Each stopped after a few losses and begun again, in turns, as processes that overlap."""
    whole = greedy_path(shared(tmp_path / "whole", Counted()), 6, 4)
    made: list[Variant] = []
    found: dict[int, object] = {}
    while len(found) < workers:
        for worker in range(workers):
            loss = Counted(stop_at=2)
            try:
                path = greedy_path(shared(tmp_path / "a", loss, worker, workers), 6, 4)
                found[worker] = path
            except KeyboardInterrupt:
                pass
            made += loss.made
    assert all(path == whole for path in found.values())
    assert len(made) == len(set(map(frozenset, made))) == 1 + 6 + 5 + 4 + 3


def test_workers_at_the_same_time_find_what_one_would(tmp_path: Path) -> None:
    whole = greedy_path(shared(tmp_path / "whole", Counted()), 12, 5)
    losses = [Counted() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        paths = pool.map(
            lambda worker: greedy_path(shared(tmp_path / "a", losses[worker], worker, 4), 12, 5),
            range(4),
        )
        assert all(path == whole for path in paths)
    done = {frozenset(variant) for loss in losses for variant in loss.made}
    assert len(done) == num_scores(PolicyKind.greedy, 12, 5)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


def test_the_order_in_which_layers_were_chosen_does_not_count(tmp_path: Path) -> None:
    loss = Counted()
    shared(tmp_path, loss)([(3, 1)])
    assert shared(tmp_path, loss)([(1, 3)]) == shared(tmp_path, loss)([(3, 1)])
    assert loss.made == [(3, 1)]


def test_the_folder_says_what_its_losses_follow_from(tmp_path: Path) -> None:
    losses = shared(tmp_path / "a", Counted())
    losses(ROUND)
    found = read_manifest(tmp_path / "a")
    assert found is not None and found.made_by == FACTS
    assert all(facts["seconds"] >= 0 for facts in losses.facts.values())


@pytest.mark.parametrize(
    "damage",
    ["{", "[]", json.dumps({"layers": [9], "loss": 0.0}), json.dumps({"layers": [2]})],
)
def test_a_damaged_loss_is_named(tmp_path: Path, damage: str) -> None:
    shared(tmp_path, Counted())([(2,)])
    (file,) = (path for path in tmp_path.glob("*.json") if path.name != MANIFEST)
    file.write_text(damage)
    with pytest.raises(TCError, match=file.name):
        shared(tmp_path, Counted())([(2,)])
