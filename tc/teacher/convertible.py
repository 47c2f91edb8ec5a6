"""Which models can be converted: causal decoders of plain softmax attention with rotary positions.

The student swaps `model.model.layers[i].self_attn` and reads `q_proj`, `k_proj`, `v_proj`,
`o_proj` and, where there are any, their biases and per-head `q_norm` and `k_norm`. Whatever else an
attention module does (soft-capping, windows, norms over a whole projection, its own scaling) would
be lost without a sound, so such models are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tc.errors import one_message

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

SUPPORTED = (
    "arcee",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""Model types of `transformers` whose attention is the plain one; each is proved so in a test."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")

BY_LAYER = ("qwen2", "qwen2_moe", "qwen3")
"""Types that choose the window layer by layer (`layer_types`); the others have one for all."""

WHY_NOT = {
    "bloom": "it has ALiBi positions and a fused query_key_value",
    "cohere": "its rotary layout is interleaved and its layers run attention and MLP in parallel",
    "deepseek_v3": "its attention is latent (MLA)",
    "falcon": "it has a fused query_key_value",
    "gemma": "its norms and embeddings are scaled in their own way",
    "gemma2": "it caps attention logits and has sliding windows",
    "gemma3_text": "it has sliding windows and its own attention scale",
    "gpt2": "it has learned positions and a fused c_attn",
    "gpt_neox": "it has a fused query_key_value",
    "granite": "it has its own attention scale",
    "gpt_oss": "it has attention sinks and sliding windows",
    "olmo2": "it normalises whole projections, not heads",
    "olmoe": "it normalises whole projections, not heads",
    "phi3": "it has a fused qkv_proj",
    "smollm3": "some of its layers have no positions",
}

ADVICE = (
    "This teacher cannot be converted. Allowed: causal models of type "
    f"{', '.join(SUPPORTED)}, full attention in every layer, weights not quantized by "
    "transformers. Choose another teacher= or teacher.path=:"
)


def check_convertible(subject: PreTrainedConfig | PreTrainedModel) -> None:
    """Refuses a model that the student could not follow exactly.

    Args:
        subject: a configuration (before anything is downloaded or read) or a loaded model, whose
            attention modules are then looked at too.

    Raises:
        TCError: with every reason at once.
    """
    config = getattr(subject, "config", subject)
    problems = config_problems(config)
    if subject is not config and not problems:
        problems = model_problems(subject)
    if problems:
        raise one_message(problems, ADVICE)


def config_problems(config: PreTrainedConfig) -> list[str]:
    """The reasons against a model that its configuration tells, empty where there are none."""
    problems = []
    kind = config.model_type
    if kind not in SUPPORTED:
        why = f": {WHY_NOT[kind]}" if kind in WHY_NOT else ""
        problems.append(f"its model type is {kind or 'not stated'}{why}")
    if getattr(config, "is_encoder_decoder", False):
        problems.append("it is an encoder-decoder")
    if getattr(config, "quantization_config", None):
        problems.append("its weights are quantized (quantization_config); take the full-precision")
    if kind in SUPPORTED:  # others call their sizes otherwise
        problems += size_problems(config.to_dict()) + _rotary_problems(config)
    return problems + _window_problems(config)


SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings"),
)
MOST, MOST_LAYERS = 2**31 - 1, 10_000


def size_problems(stated: Mapping[str, Any]) -> list[str]:
    """Sizes that no model can have; transformers would divide by them, or build for ever.

    Args:
        stated: fields of a configuration by name, or some of them.
    """
    sizes = {name: stated[name] for name in SIZES if name in stated}
    optional = [name for name in ("num_key_value_heads", "head_dim") if sizes.get(name) is None]
    for name in optional:
        sizes.pop(name, None)
    problems = [
        f"its {name} is {value!r}; a whole number from 1 to {_most(name)} is allowed"
        for name, value in sizes.items()
        if type(value) is not int or not 1 <= value <= _most(name)
    ]
    return problems or _relations(sizes) + _token_problems(stated)


def _most(name: str) -> int:
    return MOST_LAYERS if name == "num_hidden_layers" else MOST


def _relations(sizes: Mapping[str, int]) -> list[str]:
    heads, width = sizes.get("num_attention_heads"), sizes.get("hidden_size")
    groups, head_dim = sizes.get("num_key_value_heads"), sizes.get("head_dim")
    problems = []
    if heads and groups and heads % groups:
        problems.append(
            f"its num_attention_heads={heads} are no multiple of num_key_value_heads={groups}"
        )
    if heads and width and width % heads and head_dim is None:
        problems.append(f"its hidden_size={width} is no multiple of num_attention_heads={heads}")
    elif heads and width and (channels := head_dim or width // heads) % 2:
        problems.append(f"its head_dim is {channels}; rotary positions need an even one")
    return problems


def _token_problems(stated: Mapping[str, Any]) -> list[str]:
    rows = stated.get("vocab_size", MOST)
    ids = {name: stated.get(name) for name in ("pad_token_id",)}
    return [
        f"its {name} is {value!r}, but vocab_size is {rows}"
        for name, value in ids.items()
        if isinstance(value, int) and not -1 <= value < rows
    ]


def _rotary_problems(config: PreTrainedConfig) -> list[str]:
    rope = getattr(config, "rope_parameters", None)
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    if theta is not None and not (isinstance(theta, int | float) and 0 < theta < math.inf):
        return [f"its rope_theta is {theta!r}; a number above 0 is allowed"]
    return []


def _window_problems(config: PreTrainedConfig) -> list[str]:
    """Layers whose attention does not see the whole past."""
    others = sorted({*(getattr(config, "layer_types", None) or [])} - {"full_attention"})
    if others:
        which = [i for i, kind in enumerate(config.layer_types) if kind != "full_attention"]
        return [f"layers {which} have {', '.join(others)} (use_sliding_window or layer_types)"]
    # Qwen2 keeps a window in its config that no layer uses; its layer_types have been read above.
    window = None if config.model_type in BY_LAYER else getattr(config, "sliding_window", None)
    if window is not None:
        return [
            f"all its layers have a sliding window of {window} tokens (set sliding_window to null "
            "in a local copy of its config.json if you never use longer contexts)"
        ]
    return []


def model_problems(model: PreTrainedModel) -> list[str]:
    """The reasons against a loaded model that its modules tell, empty where there are none."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        return ["it has no decoder layers at model.model.layers"]
    problems = []
    for index, layer in enumerate(layers):
        attention = getattr(layer, "self_attn", None)
        found = ["there is no self_attn"] if attention is None else _attention_problems(attention)
        problems += [f"layer {index}: {problem}" for problem in found]
    return problems


def _attention_problems(attention: nn.Module) -> list[str]:
    from torch import nn

    problems = []
    children = dict(attention.named_children())
    for name in PROJECTIONS:
        # A subclass (LoRA, quantized) computes something else than its weight says.
        if type(children.pop(name, None)) is not nn.Linear:
            problems.append(f"{name} is not a plain Linear")
    norms = [children.pop(name, None) for name in HEAD_NORMS]
    if children:
        problems.append(f"self_attn also has {', '.join(children)}")
    head_dim = getattr(attention, "head_dim", None)
    problems += _norm_problems(norms, head_dim)
    if head_dim is None or getattr(attention, "scaling", None) != head_dim**-0.5:
        problems.append("its attention scale is not head_dim ** -0.5")
    if not getattr(attention, "is_causal", False):
        problems.append("its attention is not causal")
    return problems


def _norm_problems(norms: list[Any], head_dim: int | None) -> list[str]:
    present = [norm for norm in norms if norm is not None]
    if len(present) == 1:
        return ["only one of q_norm and k_norm is there"]
    if any(tuple(norm.weight.shape) != (head_dim,) for norm in present):
        return [f"q_norm and k_norm are not over a head ({head_dim} channels)"]
    return []
