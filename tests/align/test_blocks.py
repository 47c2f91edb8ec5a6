"""Blocks learn on the student's stream, and the stream is the model's own."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from align_helpers import TEACHERS, packed, settings
from composing import group
from transformers import PreTrainedModel

from tc.align import Walk, align_block, blocks_of, run
from tc.align.module import BlockAlignment
from tc.align.run import decoder_layer
from tc.config import AlignConfig, Schedule, StudentConfig
from tc.data import Packed
from tc.errors import TCError
from tc.init import form_of, fresh_mixer
from tc.student.hybrid import build_student
from tc.student.mixer import GatedDeltaNet
from tc.teacher import load_teacher
from tc.teacher.stream import Stream

TOKENS = {"calibration": packed(8, 1), "selection": packed(3, 2)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedModel]:
    cache = tmp_path_factory.mktemp("cache")
    return {name: load_teacher(group("teacher", name), cache).model for name in TEACHERS}


def mixers_of(model: PreTrainedModel, layers: list[int]) -> dict[int, GatedDeltaNet]:
    attention = [model.model.layers[i].self_attn for i in layers]
    form = form_of(attention[0], StudentConfig(), "auto")
    return {i: fresh_mixer(a, i, form, 0) for i, a in zip(layers, attention, strict=True)}


def hidden_states(model: PreTrainedModel, tokens: Packed) -> tuple[torch.Tensor, ...]:
    """What each layer reads before its norm, and at last what the final norm says."""
    with torch.no_grad():
        return model.model(
            tokens.input_ids,
            position_ids=tokens.position_ids,
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states


def targets(model: PreTrainedModel, behind: int) -> dict[str, torch.Tensor]:
    """What the teacher's layer behind a block reads, by part."""
    made = {}
    for part, tokens in TOKENS.items():
        seen = hidden_states(model, tokens)[behind]
        last = behind == len(model.model.layers)
        made[part] = seen if last else model.model.layers[behind].input_layernorm(seen)
    return made


@pytest.mark.parametrize(
    ("converted", "blocks"),
    [
        ([], []),
        ([5], [[5]]),
        ([1, 2, 3, 5, 6, 7], [[1, 2, 3], [5, 6, 7]]),
        ([3, 1, 2], [[1, 2, 3]]),
        ([0, 1, 2, 3, 4], [[0, 1], [2, 3, 4]]),
        (list(range(9)), [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        ([0, 2, 4], [[0], [2], [4]]),
    ],
)
def test_blocks_are_runs_of_layers_of_even_size(
    converted: list[int], blocks: list[list[int]]
) -> None:
    assert blocks_of(converted, 4) == blocks


@pytest.mark.parametrize("name", TEACHERS)
def test_a_stream_is_what_the_model_computes(models, name: str) -> None:
    model, tokens = models[name], packed(9, 3)
    want = hidden_states(model, tokens)
    stream = Stream(model, tokens.input_ids, tokens.position_ids)
    assert torch.equal(stream.hidden, want[0])
    stream.advance(list(model.model.layers[:1]))
    torch.testing.assert_close(stream.hidden, want[1], rtol=1e-5, atol=1e-5)
    stream.advance(list(model.model.layers[1:]))
    torch.testing.assert_close(model.model.norm(stream.hidden), want[-1], rtol=1e-4, atol=1e-4)
    # Wrong on purpose: documents that see the one before them.
    blind = Stream(model, tokens.input_ids, torch.arange(32).expand(9, -1))
    blind.advance(list(model.model.layers))
    assert torch.allclose(blind.hidden[:-1], stream.hidden[:-1], atol=1e-4)
    assert not torch.allclose(blind.hidden[-1], stream.hidden[-1], atol=1e-2)


@pytest.mark.parametrize("name", TEACHERS)
def test_a_walk_goes_where_the_student_goes(models, name: str) -> None:
    model = models[name]
    last = len(model.model.layers)
    mixers = mixers_of(model, [0])
    student = build_student(model, copy.deepcopy(mixers), {})
    walk = Walk(model, TOKENS)
    walk.mixers.update(mixers)
    walk.reach(1)
    for part, stream in walk.reach(last).items():
        want = hidden_states(student, TOKENS[part])[-1]
        torch.testing.assert_close(model.model.norm(stream.hidden), want, rtol=1e-4, atol=1e-4)
        teacher = hidden_states(model, TOKENS[part])[-1]
        assert not torch.allclose(want, teacher, atol=1e-2)
    with pytest.raises(AssertionError, match="behind"):
        walk.reach(0)


def test_a_bfloat16_teacher_has_a_float32_stream(models) -> None:
    model = copy.deepcopy(models["random_llama"]).bfloat16()
    walk = Walk(model, TOKENS)
    walk.mixers.update(mixers_of(model, [0]))
    stream = walk.reach(2)["selection"].hidden
    assert stream.dtype == torch.float32 and stream.isfinite().all()


def aligned(model: PreTrainedModel, layers: list[int], cfg: AlignConfig, seed: int = 0):
    mixers = mixers_of(model, layers)
    streams = Walk(model, TOKENS).reach(layers[0])
    made = align_block(model, mixers, streams, targets(model, layers[-1] + 1), cfg, seed)
    return mixers, made


@pytest.mark.parametrize("name", TEACHERS)
def test_a_block_learns_and_the_teacher_does_not(models, name: str) -> None:
    model = models[name]
    before = copy.deepcopy(model.state_dict())
    last = len(model.model.layers) - 1
    for layers in ([0, 1], [last]):
        cfg = settings(block_steps=12, check_every=12)
        mixers, made = aligned(model, layers, cfg)
        assert [step for step, _ in made.history] == [0, 12]
        assert made.after < made.before
        for i, fresh in mixers_of(model, layers).items():
            changed = dict(mixers[i].named_parameters())
            assert not any(p.requires_grad for p in changed.values())
            assert all(not torch.equal(p, changed[n]) for n, p in fresh.named_parameters())
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


@pytest.mark.parametrize("lr", [1e-3, 3e-2])
def test_the_kept_state_is_the_one_that_was_measured(models, lr: float) -> None:
    model = models["random_llama"]
    cfg = settings(
        block_steps=6,
        block_lr_projections=lr,
        block_lr_dynamics=lr,
        schedule=Schedule.constant,
    )
    mixers, made = aligned(model, [0, 1], cfg)
    errors = [error for _, error in made.history]
    assert made.after == min(errors) and all(a != b for a, b in pairwise(errors))
    # Measured once more by hand: the student's stream behind the block, normed, and the teacher's.
    stream = Walk(model, TOKENS).reach(0)["selection"]
    stream.advance([decoder_layer(model, i, mixer) for i, mixer in mixers.items()])
    want = targets(model, 2)["selection"]
    gap = model.model.layers[2].input_layernorm(stream.hidden) - want
    error = float(gap.square().sum() / want.square().sum())
    assert made.after == pytest.approx(error, rel=1e-4)


def test_blocks_have_steps_and_learning_rates_of_their_own(models, monkeypatch) -> None:
    seen: list[AlignConfig] = []
    real = run.BlockAlignment

    def noting(*args: Any) -> BlockAlignment:
        seen.append(args[-1])
        return real(*args)

    monkeypatch.setattr(run, "BlockAlignment", noting)
    cfg = settings(block_steps=2, block_lr_projections=0.1, block_lr_dynamics=0.2)
    _, made = aligned(models["random_llama"], [1], cfg)
    assert made.history[-1][0] == 2
    assert (seen[0].steps, seen[0].lr_projections, seen[0].lr_dynamics) == (2, 0.1, 0.2)


def test_same_seed_same_block(models) -> None:
    model, cfg = models["random_qwen3"], settings(block_steps=3)
    (a, _), (b, _), (c, _) = (aligned(model, [1], cfg, seed) for seed in (0, 0, 1))
    assert all(torch.equal(x, b[1].state_dict()[n]) for n, x in a[1].state_dict().items())
    assert any(not torch.equal(x, c[1].state_dict()[n]) for n, x in a[1].state_dict().items())


def made_module(model: PreTrainedModel, mixers: dict[int, GatedDeltaNet]) -> BlockAlignment:
    layers = [decoder_layer(model, i, mixer) for i, mixer in mixers.items()]
    streams = Walk(model, TOKENS).reach(0)
    norm = model.model.layers[len(mixers)].input_layernorm
    wanted = targets(model, len(mixers))
    return BlockAlignment(list(mixers.values()), layers, norm, streams, wanted, settings())


@pytest.mark.parametrize("name", TEACHERS)
def test_only_mixers_are_trained_and_kept(models, name: str) -> None:
    mixers = mixers_of(models[name], [0, 1][: len(models[name].model.layers) - 1])
    module = made_module(models[name], mixers)
    module.mixers.requires_grad_(True)
    module.training_step((torch.tensor([0, 5]),), 0).backward()
    trained = {id(p) for mixer in mixers.values() for p in mixer.parameters()}
    assert {id(p) for p in module.parameters()} == trained
    assert len(module.state_dict()) == sum(len(m.state_dict()) for m in mixers.values())
    for mixer in mixers.values():
        for parameter, value in mixer.named_parameters():
            assert value.grad is not None and (value.grad != 0).any(), parameter
    assert all(p.grad is None for p in models[name].parameters())


def test_a_loss_that_is_not_finite_names_the_layers(models) -> None:
    module = made_module(models["random_llama"], mixers_of(models["random_llama"], [0, 1]))
    module._outside[3]["calibration"][0, 0, 0] = torch.nan
    with pytest.raises(TCError, match=r"layer 0, 1 is nan at step 0.*align\.block_lr_projections"):
        module.training_step((torch.tensor([0]),), 0)
