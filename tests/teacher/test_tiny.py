"""The trained tiny teachers: each has learned English, and has what it is there for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from composing import group

from tc.config import DataConfig, DataKind
from tc.data.splits import load_splits
from tc.teacher import Teacher, load_teacher, read_geometry
from tc.teacher.embedded import embedded_path

TINY = ("tiny_llama", "tiny_qwen2", "tiny_qwen3")


@pytest.fixture(scope="module", params=TINY)
def tiny(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Teacher]:
    cfg = group("teacher", request.param)
    return request.param, load_teacher(cfg, tmp_path_factory.mktemp("cache"))


def test_what_each_is_there_for(tiny) -> None:
    name, teacher = tiny
    attention = teacher.model.model.layers[0].self_attn
    config, sizes = teacher.model.config, teacher.geometry
    assert (attention.q_proj.bias is not None) == (name == "tiny_qwen2")
    assert hasattr(attention, "q_norm") == (name == "tiny_qwen3")
    assert (config.rope_parameters["rope_type"] == "llama3") == (name == "tiny_llama")
    wide = sizes.head_dim * sizes.num_attention_heads != sizes.hidden_size
    assert wide == (name == "tiny_qwen3")
    assert sizes.num_key_value_heads < sizes.num_attention_heads
    assert sizes == read_geometry(group("teacher", name))


def test_biases_and_norms_have_learned_something(tiny) -> None:
    name, teacher = tiny
    learned = {"tiny_qwen2": (".bias", 0.0), "tiny_qwen3": ("k_norm.weight", 1.0)}
    if name in learned:
        end, fresh = learned[name]
        values = [p for n, p in teacher.model.named_parameters() if n.endswith(end)]
        assert values and all((p != fresh).any() for p in values)
        assert torch.cat([(p - fresh).flatten() for p in values]).abs().mean() > 0.02


def test_reads_english(tiny) -> None:
    _, teacher = tiny
    splits = load_splits(DataConfig(name="speeches", kind=DataKind.speeches), 0)
    text = splits.parts["evaluation"][0].text[:4000]

    def bits_a_byte(text: str) -> float:
        ids = torch.tensor([teacher.tokenizer(text).input_ids])
        with torch.no_grad():
            nats = teacher.model(ids, labels=ids).loss * (ids.shape[1] - 1)
        return float(nats) / len(text.encode()) / torch.log(torch.tensor(2.0)).item()

    words = text.split()
    random.Random(0).shuffle(words)
    assert bits_a_byte(text) < 2.6
    # The control: the same words in another order are no English.
    assert bits_a_byte(" ".join(words)) > bits_a_byte(text) + 0.3


def test_small_enough_to_come_with_the_package(tiny) -> None:
    name, _ = tiny
    folder: Path = embedded_path(group("teacher", name))
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2_000_000
