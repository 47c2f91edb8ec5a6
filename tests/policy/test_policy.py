"""Which layers keep attention."""

from __future__ import annotations

import pytest
from composing import CONF, group

from tc.config import PolicyConfig, PolicyKind
from tc.errors import TCError
from tc.policy import converted_layers, kept_layers

NAMES = sorted(path.stem for path in (CONF / "policy").glob("*.yaml"))
KEPT_OF_28 = {
    "every2": list(range(0, 28, 2)),
    "every4": [0, 4, 8, 12, 16, 20, 24],  # the paper's
    "every8": [0, 8, 16, 24],
    "none": [],
    "all": list(range(28)),
    "layers": [3, 9],
}


def composed(name: str) -> PolicyConfig:
    return group("policy", name, *(["policy.keep=[9,3]"] if name == "layers" else []))


@pytest.mark.parametrize("name", NAMES)
def test_shipped_policies_on_28_layers(name: str) -> None:
    cfg = composed(name)
    assert cfg.name == name and kept_layers(cfg, 28) == KEPT_OF_28[name]
    assert sorted(kept_layers(cfg, 28) + converted_layers(cfg, 28)) == list(range(28))


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


@pytest.mark.parametrize("keep", [[6], [0, -1], [2, 6, 7]])
def test_layers_that_do_not_exist_are_named(keep: list[int]) -> None:
    cfg = PolicyConfig(kind=PolicyKind.layers, keep=keep)
    outside = ", ".join(str(i) for i in keep if not 0 <= i < 6)
    with pytest.raises(TCError, match=f"layers 0 to 5, not {outside}"):
        converted_layers(cfg, 6)


def test_an_empty_teacher_has_nothing_to_keep() -> None:
    assert kept_layers(PolicyConfig(kind=PolicyKind.every, stride=4), 0) == []
