"""Every shipped teacher composes; what it states is checked as far as this machine can."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import group
from teacher_helpers import EMBEDDED
from transformers import AutoConfig

from tc.config import TeacherConfig, TeacherSource
from tc.teacher import load_teacher, read_geometry
from tc.teacher.geometry import count_parameters, empty_model, geometry_of

FOLDER = Path(__file__).parents[2] / "conf" / "teacher"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
RANDOM = [name for name in NAMES if name.startswith("random_")]

QWEN = {"vocab_size": 151936}
SMOLLM = {"vocab_size": 49152, "tie_word_embeddings": True}
# From the config.json of each model on the hub.
HUB = {
    "qwen2_5_1_5b": ("qwen2", QWEN | {"intermediate_size": 8960, "tie_word_embeddings": True}),
    "qwen2_5_3b": ("qwen2", QWEN | {"intermediate_size": 11008, "tie_word_embeddings": True}),
    "llama3_2_3b": (
        "llama",
        {"vocab_size": 128256, "intermediate_size": 8192, "tie_word_embeddings": True},
    ),
    "qwen3_0_6b": ("qwen3", QWEN | {"intermediate_size": 3072, "tie_word_embeddings": True}),
    "qwen3_4b": ("qwen3", QWEN | {"intermediate_size": 9728, "tie_word_embeddings": True}),
    "qwen3_8b": ("qwen3", QWEN | {"intermediate_size": 12288}),
    "qwen3_30b_a3b": (
        "qwen3_moe",
        QWEN | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    "smollm2_135m_base": ("llama", SMOLLM | {"intermediate_size": 1536}),
    "smollm2_360m": ("llama", SMOLLM | {"intermediate_size": 2560}),
    "smollm2_1_7b": ("llama", SMOLLM | {"intermediate_size": 8192}),
}


def composed(name: str, *overrides: str) -> TeacherConfig:
    cfg = group("teacher", name, *overrides)
    assert isinstance(cfg, TeacherConfig)
    return cfg


@pytest.mark.parametrize("name", NAMES)
def test_composes_and_is_described(name: str) -> None:
    overrides = [f"teacher.path=/models/{name}"] if name in ("hf", "gguf") else []
    cfg = composed(name, *overrides)
    assert cfg.name == name
    assert (FOLDER / f"{name}.yaml").read_text().startswith("# ")


@pytest.mark.parametrize("name", RANDOM)
def test_random_ones_load(name: str, tmp_path) -> None:
    cfg = composed(name)
    teacher = load_teacher(cfg, tmp_path)
    assert teacher.geometry == read_geometry(cfg)
    assert teacher.geometry.parameters < 200_000
    assert teacher.geometry.num_key_value_heads < teacher.geometry.num_attention_heads


def test_random_qwen3_has_wide_heads(tmp_path) -> None:
    sizes = read_geometry(composed("random_qwen3"))
    assert sizes.head_dim * sizes.num_attention_heads != sizes.hidden_size


@pytest.mark.parametrize("name", HUB)
def test_hub_sizes_are_those_of_the_model(name: str) -> None:
    cfg = composed(name)
    kind, fields = HUB[name]
    stated = read_geometry(cfg)
    shape = {key: getattr(stated, key) for key in vars(stated) if key != "parameters"}
    config = AutoConfig.for_model(kind, **fields | shape)
    assert geometry_of(config, count_parameters(empty_model(config))) == stated
    assert (cfg.source, cfg.revision) == (TeacherSource.hf, "main")


def test_hub_parameters_are_the_published_ones() -> None:
    billions = {name: round(read_geometry(composed(name)).parameters / 1e9, 2) for name in HUB}
    published = [1.54, 3.09, 3.21, 0.6, 4.02, 8.19, 30.53, 0.13, 0.36, 1.71]
    assert list(billions.values()) == published


def test_embedded_one_is_the_one_under_test(embedded) -> None:
    cfg = composed("smollm2_135m")
    assert {key: getattr(cfg, key) for key in EMBEDDED} == EMBEDDED
    assert read_geometry(cfg) == embedded.geometry
