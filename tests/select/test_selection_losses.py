"""Losses with kept prefixes are those of whole models that are built and run."""

from __future__ import annotations

import copy

import pytest
import torch
from select_helpers import NAMES, mixers, packed, plain_kl, plain_nll, teacher

from tc.errors import TCError
from tc.select import BypassLoss, HybridLoss
from tc.select.trunk import Bypassed, Trunk, with_attention

VARIANTS = [(), (0,), (3,), (1, 3), (1, 0), (1, 0, 2), (0, 1, 2, 3), (2,), ()]
"""Forwards and back: what is kept of earlier ones must not show."""
CLOSE = {"rel": 1e-5, "abs": 1e-5}


@pytest.mark.parametrize("name", NAMES)
def test_a_students_loss_is_that_of_the_built_student(name: str) -> None:
    model, tokens = teacher(name), packed()
    loss = HybridLoss(model, mixers(model), tokens)
    for variant in VARIANTS:
        assert loss(variant) == pytest.approx(plain_kl(model, variant, tokens), **CLOSE)
    assert loss((0, 1, 2, 3)) == pytest.approx(0, abs=1e-6)
    # Wrong on purpose: a student that keeps another layer, and one on other tokens.
    assert loss((1,)) != pytest.approx(plain_kl(model, (2,), tokens), **CLOSE)
    assert loss((1,)) != pytest.approx(plain_kl(model, (1,), packed(seed=2)), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_a_bypassed_layer_says_nothing(name: str) -> None:
    model, tokens = teacher(name), packed()
    loss = BypassLoss(model, tokens)
    for variant in [(), (0,), (3,), (1,), ()]:
        assert loss(variant) == pytest.approx(plain_nll(model, variant, tokens), **CLOSE)
    # Wrong on purpose: another layer's bypass.
    assert loss((1,)) != pytest.approx(plain_nll(model, (2,), tokens), **CLOSE)


def test_a_bfloat16_student_is_the_one_that_would_be_saved() -> None:
    model, tokens = teacher(dtype="bfloat16"), packed()
    loss = HybridLoss(model, mixers(model), tokens)
    for variant in [(), (2,), (2, 0)]:
        assert loss(variant) == pytest.approx(plain_kl(model, variant, tokens), rel=2e-2)
    assert loss((2,)) != pytest.approx(plain_kl(model, (1,), tokens), rel=2e-2)


def test_the_teacher_is_left_as_it_was() -> None:
    model, tokens = teacher(), packed()
    before = copy.deepcopy(model.state_dict())
    HybridLoss(model, mixers(model), tokens)((1,))
    BypassLoss(model, tokens)((1,))
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


def test_another_attention_shares_all_other_memory() -> None:
    layer = teacher().model.layers[1]
    other = with_attention(layer, torch.nn.Identity())
    assert other.mlp.up_proj.weight is layer.mlp.up_proj.weight
    assert isinstance(other.self_attn, torch.nn.Identity)
    assert layer.self_attn is not other.self_attn


def test_a_variant_costs_only_the_layers_from_its_last_one_on() -> None:
    model = teacher()
    loss = HybridLoss(model, mixers(model), packed(num=2))
    loss((2, 0))
    runs: list[int] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
        for layer in [*loss.attending, *loss.converted]
    ]
    costs = []
    for variant in [(2, 3), (2, 1), (2, 3)]:
        loss(variant)
        costs.append(len(runs) - sum(costs))
    for hook in hooks:
        hook.remove()
    # The first carries the stream of the base on, which stood in front of layer 0.
    assert costs == [3 + 1, 3, 1]


def test_only_hidden_states_are_kept() -> None:
    model, tokens = teacher(), packed()
    loss = HybridLoss(model, mixers(model), tokens)
    loss((1,))
    V = model.config.vocab_size
    kept = [*loss.targets, *loss.trunk._inputs]
    assert all(x.shape[-1] == model.config.hidden_size != V for x in kept)


def test_a_loss_that_is_not_finite_names_the_layers() -> None:
    model = teacher()
    poisoned = mixers(model)
    poisoned[3].o_proj.weight.data[0, 0] = float("nan")
    loss = HybridLoss(model, poisoned, packed())
    with pytest.raises(TCError, match=r"keeps layers \[1\] is nan"):
        loss((1,))
    assert loss((3,)) > 0


def test_a_trunk_forgets_what_a_replaced_layer_has_changed() -> None:
    model, tokens = teacher(), packed()
    layers = list(model.model.layers)
    trunk = Trunk(model, layers, tokens)
    first = torch.cat([hidden for _, hidden in trunk.finals()])
    trunk.put(1, with_attention(layers[1], Bypassed()))
    changed = torch.cat([hidden for _, hidden in trunk.finals()])
    trunk.put(1, layers[1])
    again = torch.cat([hidden for _, hidden in trunk.finals()])
    assert torch.equal(first, again) and not torch.allclose(first, changed, atol=1e-2)
