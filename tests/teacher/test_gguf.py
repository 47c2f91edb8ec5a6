"""GGUF files: the conversion is exact, and what is wrong with a file is said in one message."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from teacher_helpers import gguf_cfg, gguf_tensors, logits, random_cfg

from tc.artifacts import hash_file
from tc.config import TeacherConfig, TeacherSource
from tc.errors import TCError
from tc.teacher import convert_gguf, gguf_config, gguf_convert, load_teacher, read_geometry

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, **gguf_config.LLAMA3}
VARIANTS = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama_biased": ("llama", {"attention_bias": True, "head_dim": 24}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama_linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_wide": ("qwen2", {"head_dim": 24}),
    "qwen3": ("qwen3", {"head_dim": 24}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_model_says_what_the_exported_one_says(variant, export, tmp_path) -> None:
    architecture, fields = VARIANTS[variant]
    path, source = export(architecture, fields)
    teacher = load_teacher(gguf_cfg(path, sha256=hash_file(path)), tmp_path / "cache")
    assert torch.equal(logits(teacher.model), logits(source))
    assert teacher.geometry == read_geometry(gguf_cfg(path))
    assert teacher.geometry == read_geometry(random_cfg(architecture, **fields))
    assert teacher.identity["gguf_sha256"] == hash_file(path)


@pytest.mark.parametrize("wrong", ["order kept", "query heads for keys"])
def test_control_wrong_row_order_is_seen(wrong, export, tmp_path, monkeypatch) -> None:
    right = gguf_convert.unpermuted
    wrongs = {
        "order kept": lambda v, heads: v,
        "query heads for keys": lambda v, heads: right(v, 4),
    }
    monkeypatch.setattr(gguf_convert, "unpermuted", wrongs[wrong])
    path, source = export("llama")
    teacher = load_teacher(gguf_cfg(path), tmp_path / "cache")
    assert (logits(teacher.model) - logits(source)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("architecture", "part"), [("qwen2", "q_proj.bias"), ("qwen3", "k_norm.weight")]
)
def test_control_lost_biases_and_norms_would_be_seen(architecture, part, export) -> None:
    _, source = export(architecture)
    before = logits(source)
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if name.endswith(part):
                parameter.fill_(float(part.endswith("weight")))
    assert (logits(source) - before).abs().max() > 0.01


def test_control_lost_rotary_scaling_would_be_seen(export) -> None:
    _, scaled = export("llama", {"rope_parameters": LLAMA3, "head_dim": 32})
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    _, other = export("llama", {"rope_parameters": plain, "head_dim": 32})
    assert not torch.equal(logits(scaled, 120), logits(other, 120))


def test_partial_biases_become_zeros(export, tmp_path) -> None:
    """llama.cpp allows biases on q, k and v alone; transformers' Llama has four or none."""
    path, source = export(
        "llama",
        {"attention_bias": True},
        lambda t: [t.pop(n) for n in list(t) if n.endswith("attn_output.bias")],
    )
    with torch.no_grad():
        for layer in source.model.layers:
            layer.self_attn.o_proj.bias.zero_()
    teacher = load_teacher(gguf_cfg(path), tmp_path / "cache")
    assert torch.equal(logits(teacher.model), logits(source))


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_llama3_factors_are_transformers_own(theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = LLAMA3 | {"rope_theta": theta}
    config = LlamaConfig(head_dim=64, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** -(np.arange(0, 64, 2) / 64)
    assert np.allclose(
        plain / scaled.numpy(), gguf_config.llama3_factors(theta, 64, rope), rtol=1e-5
    )


def test_half_precision_tensors_are_read(export, tmp_path) -> None:
    def halve(tensors: dict[str, np.ndarray]) -> None:
        tensors.update({k: v.astype(np.float16) for k, v in tensors.items() if v.ndim == 2})

    path, source = export("qwen3", tensors=halve)
    teacher = load_teacher(gguf_cfg(path), tmp_path / "cache")
    assert torch.allclose(logits(teacher.model), logits(source), atol=0.05)


def test_second_call_reads_nothing_anew(export, tmp_path, monkeypatch) -> None:
    path, _ = export()
    folder = convert_gguf(path, tmp_path / "cache")
    monkeypatch.setattr(gguf_convert, "open_gguf", lambda path: pytest.fail("converted again"))
    assert convert_gguf(path, tmp_path / "cache") == folder
    moved = shutil.copy(path, tmp_path / "tiny2.gguf")
    with pytest.raises(pytest.fail.Exception):
        convert_gguf(Path(moved), tmp_path / "cache")


def test_damaged_cache_is_refused(export, tmp_path) -> None:
    path, _ = export()
    weights = convert_gguf(path, tmp_path / "cache") / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(TCError, match=r"model.safetensors does not have the hash"):
        convert_gguf(path, tmp_path / "cache")


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def put(name: str, shape: tuple[int, ...]) -> Any:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


REFUSED = {
    "architecture": ({"name": "gemma2"}, "architecture gemma2. Allowed.*llama, qwen2, qwen3"),
    "tokenizer type": ({"tokenizer__ggml__model": "llama"}, "type llama .*Allowed: type gpt2"),
    "pre-tokenizer": ({"tokenizer__ggml__pre": "tekken"}, "pre-tokenizer tekken.*smollm, qwen2"),
    "no tokenizer": ({"tokenizer__ggml__model": None}, "type none"),
    "tokens": ({"tokenizer__ggml__tokens": ["a", "b"]}, "damaged tokenizer: 2 tokens"),
    "merges": ({"tokenizer__ggml__merges": ["x yz"]}, "damaged merges"),
    "eos": ({"tokenizer__ggml__eos_token_id": 999}, "eos_token_id is 999, but there are 261"),
    "missing tensor": (
        {"tensors": drop("blk.1.attn_k.weight")},
        r"model.layers.1.self_attn.k_proj.weight is missing",
    ),
    "no embedding": ({"tensors": drop("token_embd.weight")}, "token_embd.weight is missing"),
    "foreign tensor": (
        {"tensors": put("blk.0.attn_qkv.weight", (4, 4))},
        "attn_qkv.weight is not part of a llama model",
    ),
    "odd name": ({"tensors": put("something", (4,))}, "something is not part of"),
    "shape": (
        {"tensors": put("blk.0.attn_q.weight", (64, 32))},
        r"attn_q.weight has shape \(64, 32\), not \(64, 64\)",
    ),
    "header": ({"llama__block_count": None}, "the header has no llama.block_count"),
    "uneven": ({"llama__attention__head_count_kv": [2, 1]}, "one positive number for all layers"),
    "zero": ({"llama__attention__head_count": 0}, "one positive number for all layers"),
    "yarn": ({"llama__rope__scaling__type": "yarn"}, "type is yarn; allowed: none, linear"),
    "old scaling": ({"llama__rope__scale_linear": 2.0}, "outdated key"),
    "rope factors": ({"tensors": put("rope_freqs.weight", (8,))}, None),
    "other factors": (
        {"tensors": lambda t: t.update({"rope_freqs.weight": np.arange(8, dtype=np.float32) + 1})},
        "not the factors of any Llama 3",
    ),
    "window": ({"llama__attention__sliding_window": 32}, "attention.sliding_window is 32"),
    "experts": ({"llama__expert_count": 8}, "expert_count is 8"),
    "partial rotary": ({"llama__rope__dimension_count": 8}, "rope.dimension_count is 8"),
    "parts": ({"split__count": 3}, "one of 3 parts"),
}


@pytest.mark.parametrize("case", [case for case, (_, says) in REFUSED.items() if says])
def test_refused_with_a_message_and_nothing_left(case, export, tmp_path) -> None:
    changes, says = REFUSED[case]
    path, _ = export(**changes)
    with pytest.raises(TCError, match=f"(?s){says}"):
        load_teacher(gguf_cfg(path), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_all_ones_rope_factors_are_plain_rotary(export, tmp_path) -> None:
    path, source = export(**REFUSED["rope factors"][0])
    teacher = load_teacher(gguf_cfg(path), tmp_path / "cache")
    assert torch.allclose(logits(teacher.model), logits(source), atol=1e-5)


def test_wrong_hash_is_said_before_the_file_is_opened(export, tmp_path) -> None:
    path, _ = export()
    path.write_bytes(b"not even GGUF")
    with pytest.raises(TCError, match=r"has the SHA-256 .* but teacher.sha256 is 0000"):
        load_teacher(gguf_cfg(path, sha256="0" * 64), tmp_path / "cache")


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.05, 0.3, 0.99])
def test_truncated_file(share: float, export, tmp_path) -> None:
    path, _ = export()
    content = path.read_bytes()
    path.write_bytes(content[: max(9, int(share * len(content)))])
    for call in (
        lambda: load_teacher(gguf_cfg(path), tmp_path / "c"),
        lambda: read_geometry(gguf_cfg(path)),
    ):
        with pytest.raises(TCError, match=r"bytes\) is truncated or damaged"):
            call()


def test_damaged_array_length_does_not_loop_for_ever(export, tmp_path) -> None:
    path, _ = export()
    content = bytearray(path.read_bytes())
    at = content.index(b"token_type") + len(b"token_type") + 8
    content[at : at + 8] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(TCError, match="is truncated or damaged"):
        convert_gguf(path, tmp_path / "cache")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip file", b"version https://git-lfs"])
def test_foreign_file(content: bytes, tmp_path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(TCError, match=r"is not a GGUF file: it begins with .*source=hf"):
        convert_gguf(path, tmp_path / "cache")


def test_no_file(tmp_path) -> None:
    with pytest.raises(TCError, match="does not exist; teacher"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "cache")
    with pytest.raises(TCError, match="is a folder; teacher"):
        convert_gguf(tmp_path, tmp_path / "cache")
    with pytest.raises(TCError, match="has no path"):
        load_teacher(TeacherConfig(name="x", source=TeacherSource.gguf), tmp_path)


def test_unknown_quantization(export, tmp_path, monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError("no such type")

    path, _ = export()
    monkeypatch.setattr("gguf.quants.dequantize", refuse)
    with pytest.raises(TCError, match=r"is stored as F32, which gguf cannot read. Allowed"):
        convert_gguf(path, tmp_path / "cache")


def test_exporter_writes_the_order_of_llama_cpp(export) -> None:
    """The exporter's own row order, spelled out, so that the round trip proves something."""
    _, source = export("llama")
    rows = source.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    stored = gguf_tensors(source)["blk.0.attn_q.weight"]
    assert np.array_equal(stored[0:4], rows[[0, 8, 1, 9]])
