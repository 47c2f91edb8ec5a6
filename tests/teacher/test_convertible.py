"""What is convertible is proved so by rebuilding its attention; what is not is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from teacher_helpers import random_cfg
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tc.errors import TCError
from tc.teacher import SUPPORTED, check_convertible, load_teacher

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXTRA = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "num_local_experts": 4},
    "qwen2_moe": MIXTURE | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": MIXTURE,
}


def tiny(kind: str) -> PreTrainedModel:
    return load_teacher(random_cfg(kind, **EXTRA.get(kind, {})), Path()).model


def attend(model: PreTrainedModel, layer: int, x: torch.Tensor, use_norms: bool = True):
    """Plain attention, from nothing but projections, head norms and rotary tables."""
    module = model.model.layers[layer].self_attn
    length, width = x.shape[1], module.head_dim
    q, k, v = (
        getattr(module, name)(x).view(1, length, -1, width)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    if use_norms and hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    cos, sin = model.model.rotary_emb(x, torch.arange(length)[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    scores = q @ k.mT / width**0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return module.o_proj((weights @ v).transpose(1, 2).flatten(2))


def seen(model: PreTrainedModel, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What an attention module is given and what it says, for one sequence."""
    caught = []
    handle = model.model.layers[layer].self_attn.register_forward_hook(
        lambda _, args, kwargs, out: caught.append((kwargs["hidden_states"], out[0])),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(torch.arange(50)[None])
    handle.remove()
    return caught[0]


@pytest.mark.parametrize("kind", SUPPORTED)
def test_attention_is_the_plain_one(kind: str) -> None:
    model = tiny(kind)
    for layer in range(2):
        x, said = seen(model, layer)
        with torch.no_grad():
            assert torch.allclose(attend(model, layer, x), said, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_control_without_norms_it_is_not(kind: str) -> None:
    model = tiny(kind)
    x, said = seen(model, 0)
    with torch.no_grad():
        assert not torch.allclose(attend(model, 0, x, use_norms=False), said, atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("gpt2", {}, "gpt2: it has learned positions and a fused c_attn"),
        ("gemma2", {}, "gemma2: it caps attention logits"),
        ("phi3", {"pad_token_id": 0}, "phi3: it has a fused qkv_proj"),
        ("olmo2", {}, "olmo2: it normalises whole projections"),
        ("granite", {}, "granite: it has its own attention scale"),
        ("mamba", {}, "its model type is mamba"),
        ("t5", {}, "(?s)its model type is t5.*it is an encoder-decoder"),
        ("mistral", {}, "all its layers have a sliding window of 4096"),
        ("mixtral", {"sliding_window": 100}, "all its layers have a sliding window of 100"),
        (
            "qwen2",
            {"use_sliding_window": True, "num_hidden_layers": 4, "max_window_layers": 2},
            r"layers \[2, 3\] have sliding_attention",
        ),
        ("qwen3_moe", {"use_sliding_window": True}, "sliding window of 4096"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "weights are quantized"),
    ],
)
def test_refused_by_name(kind, fields, says) -> None:
    config = AutoConfig.for_model(kind, **fields)
    with pytest.raises(TCError, match=says) as error:
        check_convertible(config)
    assert "llama, mistral, mixtral, qwen2" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True, "num_hidden_layers": 4, "max_window_layers": 4}),
        ("qwen2_moe", {}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("mistral", {"sliding_window": None}),
        ("mixtral", {}),
    ],
)
def test_windows_that_no_layer_uses_are_allowed(kind, fields) -> None:
    check_convertible(AutoConfig.for_model(kind, **fields))


def test_all_reasons_at_once() -> None:
    config = AutoConfig.for_model("gemma2", quantization_config={"quant_method": "fp8"})
    with pytest.raises(TCError) as error:
        check_convertible(config)
    assert all(part in str(error.value) for part in ("caps", "quantized", "sliding_attention"))


def test_modules_are_looked_at() -> None:
    model = tiny("qwen3")
    first, second = (layer.self_attn for layer in model.model.layers)
    first.qkv_proj = nn.Linear(2, 2)
    first.q_proj = nn.Identity()
    first.scaling = 1.0
    del second.k_norm
    with pytest.raises(TCError) as error:
        check_convertible(model)
    for says in (
        "layer 0: q_proj is not a plain Linear",
        "layer 0: self_attn also has qkv_proj",
        "layer 0: its attention scale is not",
        "layer 1: only one of q_norm and k_norm",
    ):
        assert says in str(error.value)


def test_norms_over_whole_projections_are_seen() -> None:
    model = load_teacher(random_cfg("qwen3", head_dim=16), Path()).model
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight = nn.Parameter(torch.ones(64))
    with pytest.raises(TCError, match=r"not over a head \(16 channels\)"):
        check_convertible(model)


def test_no_decoder_layers() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=16, n_head=2, vocab_size=20)
    model = AutoModelForCausalLM.from_config(config)
    model.config.model_type = "llama"
    with pytest.raises(TCError, match=r"no decoder layers at model.model.layers"):
        check_convertible(model)
