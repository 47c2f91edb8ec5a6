"""Which layers keep attention."""

from __future__ import annotations

from itertools import pairwise

import pytest
from composing import CONF, group

from tc.config import PolicyConfig, PolicyKind
from tc.policy import (
    SEARCHES,
    converted_layers,
    kept_layers,
    needs_all_mixers,
    num_kept,
    others,
    searches,
)

NAMES = sorted(path.stem for path in (CONF / "policy").glob("*.yaml"))
KEPT_OF_28 = {
    "every2": list(range(0, 28, 2)),
    "every4": [0, 4, 8, 12, 16, 20, 24],  # the paper's
    "every8": [0, 8, 16, 24],
    "none": [],
    "all": list(range(28)),
    "layers": [3, 9],
    "ratio": [0, 4, 8, 12, 16, 20, 24],
    "qwen2_5_1_5b_ar": [0, 1, 11, 13, 21, 25, 27],
    "qwen2_5_1_5b_ga_s2": [0, 1, 18, 19, 20, 21, 27],
}
OPTIONS = {"layers": ["policy.keep=[9,3]"], "ratio": ["policy.share=0.25"]}


def composed(name: str) -> PolicyConfig:
    return group("policy", name, *OPTIONS.get(name, []))


@pytest.mark.parametrize("name", KEPT_OF_28)
def test_shipped_policies_on_28_layers(name: str) -> None:
    cfg = composed(name)
    assert cfg.name == name and kept_layers(cfg, 28) == KEPT_OF_28[name]
    assert sorted(kept_layers(cfg, 28) + converted_layers(cfg, 28)) == list(range(28))
    assert num_kept(cfg, 28) == len(KEPT_OF_28[name])


def test_a_published_list_of_36_layers() -> None:
    cfg = composed("qwen2_5_3b_ar")
    assert kept_layers(cfg, 36) == [0, 1, 4, 25, 27, 31, 32, 33, 34] and cfg.num_layers == 36


def test_every_shipped_policy_is_tested() -> None:
    assert set(NAMES) == {*KEPT_OF_28, "qwen2_5_3b_ar", *(kind.value for kind in SEARCHES)}


@pytest.mark.parametrize("name", ["ar", "ga_s2", "greedy"])
def test_a_search_knows_how_many_layers_but_not_which(name: str) -> None:
    cfg = group("policy", name, "policy.count=5")
    assert searches(cfg) and num_kept(cfg, 28) == 5 and cfg.tokens == 2048
    assert num_kept(group("policy", name, "policy.share=0.25"), 30) == 8
    assert needs_all_mixers(cfg) == (name != "ar")
    with pytest.raises(AssertionError, match="only after stage select"):
        kept_layers(cfg, 28)


@pytest.mark.parametrize(
    ("share", "layers", "kept"),
    [
        (1.0, 4, [0, 1, 2, 3]),
        (0.5, 5, [0, 1, 3]),  # 2.5 layers are 3
        (0.3, 10, [0, 3, 6]),
        (0.75, 8, [0, 1, 2, 4, 5, 6]),
        (0.03, 28, [0]),
        (0.01, 28, []),
    ],
)
def test_a_share_is_spread_evenly(share: float, layers: int, kept: list[int]) -> None:
    cfg = PolicyConfig(kind=PolicyKind.ratio, share=share)
    assert kept_layers(cfg, layers) == kept and num_kept(cfg, layers) == len(kept)
    gaps = [after - before for before, after in pairwise([*kept, layers])]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_others_are_what_is_left() -> None:
    assert others([2, 0], 4) == [1, 3] and others([], 2) == [0, 1]


@pytest.mark.parametrize(
    ("stride", "layers", "kept"), [(1, 3, [0, 1, 2]), (4, 4, [0]), (9, 2, [0])]
)
def test_strides(stride: int, layers: int, kept: list[int]) -> None:
    cfg = PolicyConfig(kind=PolicyKind.every, stride=stride)
    assert kept_layers(cfg, layers) == kept
    assert converted_layers(cfg, layers) == [i for i in range(layers) if i not in kept]


def test_a_list_is_sorted_and_without_repetition() -> None:
    cfg = PolicyConfig(kind=PolicyKind.layers, keep=[5, 0, 5])
    assert kept_layers(cfg, 6) == [0, 5] and converted_layers(cfg, 6) == [1, 2, 3, 4]


def test_an_empty_teacher_has_nothing_to_keep() -> None:
    assert kept_layers(PolicyConfig(kind=PolicyKind.every, stride=4), 0) == []
