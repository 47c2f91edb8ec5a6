"""Random teachers: the same for the same seed, lively, and with a tokenizer of bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from teacher_helpers import SMALL, logits, random_cfg

from tc.config import DType, TeacherConfig, TeacherSource
from tc.errors import TCError
from tc.teacher import load_teacher, read_geometry


def cfg(architecture: str = "qwen2", **model) -> TeacherConfig:
    made = random_cfg(architecture)
    return replace(made, model=SMALL | model)


def test_seed_makes_the_model(tmp_path) -> None:
    first, again = (load_teacher(cfg(), tmp_path) for _ in range(2))
    other = load_teacher(replace(cfg(), seed=1), tmp_path)
    assert torch.equal(logits(first.model), logits(again.model))
    assert not torch.equal(logits(first.model), logits(other.model))
    assert first.identity == again.identity != other.identity


def test_global_generator_is_left_alone(tmp_path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load_teacher(cfg(), tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_dtype_rounds_the_same_weights(tmp_path) -> None:
    full = load_teacher(cfg(), tmp_path)
    half = load_teacher(replace(cfg(), dtype=DType.bfloat16), tmp_path)
    weight = full.model.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(weight.bfloat16(), half.model.model.layers[0].self_attn.q_proj.weight)
    assert full.identity != half.identity


def test_ready_for_use(tmp_path) -> None:
    teacher = load_teacher(cfg(), tmp_path)
    assert not teacher.model.training
    assert not any(p.requires_grad for p in teacher.model.parameters())
    assert teacher.model.config._attn_implementation == "sdpa"
    assert teacher.geometry == read_geometry(cfg())


@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        ("qwen2", "self_attn.k_proj.bias"),
        ("qwen3", "q_norm.weight"),
        ("qwen3", "model.norm.weight"),
    ],
)
def test_biases_and_norms_are_not_trivial(architecture, part, tmp_path) -> None:
    model = load_teacher(cfg(architecture), tmp_path).model
    found = [p for name, p in model.named_parameters() if name.endswith(part)]
    assert found
    assert all(p.std() > 0.1 for p in found)


def test_attention_is_not_uniform(tmp_path) -> None:
    model = load_teacher(cfg(), tmp_path).model
    model.set_attn_implementation("eager")
    ids = torch.arange(64)[None] * 7 % 251
    weights = model(ids, output_attentions=True).attentions[-1][0, :, -1]
    entropy = -(weights * weights.clamp_min(1e-9).log()).sum(-1)
    assert (entropy < 0.95 * torch.tensor(64.0).log()).all()


def test_tokenizer_is_bytes(tmp_path) -> None:
    tokenizer = load_teacher(cfg(), tmp_path).tokenizer
    text = "a\u00e9\n \U0001f642<|endoftext|>"
    ids = tokenizer(text).input_ids
    assert ids == [*"a\u00e9\n \U0001f642".encode(), 256]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text[:-13]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256
    assert tokenizer(["a", "bc"], padding=True).input_ids in (
        [[97, 256], [98, 99]],
        [[256, 97], [98, 99]],
    )


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (cfg(hiden_size=3), "hiden_size is not a field of qwen2; nearest are hidden_size"),
        (cfg(vocab_size=100), "vocab_size is 100; the byte tokenizer needs 257"),
        (cfg(hidden_size="x"), "its hidden_size is 'x'; a whole number"),
        (cfg("mistral"), "sliding window of 4096"),
        (random_cfg("gpt2"), "architecture is 'gpt2'; allowed for a random teacher: arcee, llama"),
        (TeacherConfig(name="x", source=TeacherSource.random), "architecture is None"),
    ],
)
def test_refused(made, says, tmp_path) -> None:
    with pytest.raises(TCError, match=says):
        load_teacher(made, tmp_path)
    with pytest.raises(TCError, match=says):
        read_geometry(made)


def test_stated_sizes_must_be_the_real_ones(tmp_path) -> None:
    real = read_geometry(cfg())
    load_teacher(replace(cfg(), geometry=real), tmp_path)
    wrong = replace(real, head_dim=8, parameters=5)
    with pytest.raises(TCError) as error:
        load_teacher(replace(cfg(), geometry=wrong), tmp_path)
    assert "head_dim is 8, but the teacher has 16" in str(error.value)
    assert f"parameters is 5, but the teacher has {real.parameters}" in str(error.value)
