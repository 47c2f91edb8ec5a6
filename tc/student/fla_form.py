"""A student as flash-linear-attention's own hybrid model, `GatedDeltaNetForCausalLM`.

Read from flash-linear-attention 0.6.0: its blocks are those of Llama, its converted layers are
`GatedDeltaNet`, and the layers named in `attn` have FLA's `Attention`, which knows one rotary
frequency base, heads of `hidden_size / num_heads`, and biases on q, k and v together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

from tc.student.hybrid import PREFIX
from tc.student.mixer import MixerForm

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Teachers whose feed-forward layers and norms are those of FLA's blocks."""

RENAMED = {
    "model.embed_tokens.": "model.embeddings.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
    ".self_attn.": ".attn.",
}


def fla_name(name: str) -> str:
    """FLA's name of a student's tensor."""
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    return name


def fla_problems(config: PreTrainedConfig) -> list[str]:
    """What FLA's classes cannot say of a student, empty where they can say it all."""
    return [*_block_problems(config), *_mixer_problems(config), *_attention_problems(config)]


def _block_problems(config: PreTrainedConfig) -> Iterator[str]:
    kind = config.model_type.removeprefix(PREFIX)
    if kind not in ARCHITECTURES:
        yield f"its feed-forward layers are those of {kind}; FLA's blocks have a plain gated MLP"
    if getattr(config, "mlp_bias", False):
        yield "its feed-forward layers have biases (mlp_bias)"
    if config.hidden_act not in ("silu", "swish"):
        yield f"its feed-forward layers have {config.hidden_act}; FLA's have silu"


def _mixer_problems(config: PreTrainedConfig) -> Iterator[str]:
    form = MixerForm(**config.gdn["form"])
    has = {"biases": form.qkv_bias or form.o_bias, "q and k norms": form.qk_norm}
    carried = " and ".join(name for name, is_there in has.items() if is_there)
    if carried:
        yield f"its converted layers have the teacher's {carried}; make it with student=fla"
    if form.norm_eps != config.rms_norm_eps:
        yield (
            f"norm_eps of its converted layers is {form.norm_eps:g} and that of its blocks "
            f"{config.rms_norm_eps:g}; FLA has one for both: make it with "
            f"student.norm_eps={config.rms_norm_eps:g}"
        )


def _attention_problems(config: PreTrainedConfig) -> Iterator[str]:
    """Of the layers that keep attention; where there are none, nothing is asked of it."""
    if not kept_layers(config):
        return
    if config.model_type == f"{PREFIX}qwen3":
        yield "its kept layers have q and k norms; FLA's hybrid models have none (or policy=none)"
    if _o_bias(config):
        yield "its kept layers have a bias on o_proj"
    wide = head_dim(config) * config.num_attention_heads
    if wide != config.hidden_size:
        yield (
            f"its heads are {wide} channels wide together; FLA's attention has hidden_size, "
            f"{config.hidden_size}"
        )
    rope = {k: v for k, v in (config.rope_parameters or {}).items() if v is not None}
    kind = rope.pop("rope_type", "default")
    others = sorted(set(rope) - {"rope_theta"})
    if kind != "default" or others:
        what = f"{kind} ({', '.join(others)})" if others else kind
        yield f"its rotary frequencies are scaled: {what}; FLA's attention knows rope_theta alone"


def kept_layers(config: PreTrainedConfig) -> list[int]:
    """The layers that keep attention."""
    converted = set(config.gdn["layers"])
    return [i for i in range(config.num_hidden_layers) if i not in converted]


def head_dim(config: PreTrainedConfig) -> int:
    """Channels of a head."""
    stated = getattr(config, "head_dim", None)
    return stated or config.hidden_size // config.num_attention_heads


def _qkv_bias(config: PreTrainedConfig) -> bool:
    return config.model_type == f"{PREFIX}qwen2" or bool(getattr(config, "attention_bias", False))


def _o_bias(config: PreTrainedConfig) -> bool:
    return config.model_type != f"{PREFIX}qwen2" and bool(getattr(config, "attention_bias", False))


def fla_config(config: PreTrainedConfig) -> dict[str, Any]:
    """The `config.json` of FLA's model that says what a student's says."""
    attention = {
        "layers": kept_layers(config),
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "qkv_bias": _qkv_bias(config),
        "rope_theta": (config.rope_parameters or {}).get("rope_theta", 10000.0),
        "window_size": None,
    }
    same = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "use_cache"),
        *("max_position_embeddings", "initializer_range", "tie_word_embeddings"),
        *("pad_token_id", "bos_token_id", "eos_token_id"),
    )
    facts = config.to_dict()
    return {
        "architectures": ["GatedDeltaNetForCausalLM"],
        "model_type": "gated_deltanet",
        **{key: facts[key] for key in same},
        "dtype": facts["dtype"],
        "attn": attention if attention["layers"] else None,
        "attn_mode": "chunk",
        "num_heads": config.num_attention_heads,
        "num_v_heads": None,
        "head_dim": head_dim(config),
        "expand_v": 1,
        "use_gate": config.gdn["form"]["use_gate"],
        "output_gate_activation": "swish",
        "use_short_conv": False,
        "allow_neg_eigval": False,
        "hidden_act": "swish",
        "hidden_ratio": None,
        "norm_eps": config.rms_norm_eps,
        "provenance": config.gdn["provenance"],
    }
