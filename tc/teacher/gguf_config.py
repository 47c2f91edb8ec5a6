"""A transformers configuration from the header of a GGUF file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tc.errors import TCError, one_message
from tc.teacher.convertible import size_problems
from tc.teacher.gguf_file import GgufFile, dequantized

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""GGUF architectures that are read. Dense Mistral models are `llama` there, and work alike."""

SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
EPSILON = "attention.layer_norm_rms_epsilon"
OPTIONAL = (
    *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.factor"),
)
"""Numbers that a header may leave out."""

LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What all Llama 3.1, 3.2 and 3.3 models have; their GGUF files keep only the resulting factors."""


def config_of(file: GgufFile) -> PreTrainedConfig:
    """Builds the configuration of the model in a GGUF file.

    Raises:
        TCError: with everything in the header that is missing or cannot be represented.
    """
    from transformers import AutoConfig

    if file.architecture not in ARCHITECTURES:
        raise TCError(
            f"{file.path} holds a model of architecture {file.architecture}. Allowed in a GGUF "
            f"file: {', '.join(ARCHITECTURES)}. Use teacher.source=hf with the original weights."
        )
    # Each list of problems can be made only where the one before is empty.
    problems = _missing(file) or _uneven(file) or _unrepresentable(file)
    if problems:
        raise one_message(problems, f"{file.path} cannot be read as a model:")
    fields = _fields(file)
    if problems := size_problems(fields):
        raise one_message(problems, f"{file.path} cannot be read as a model:")
    try:
        return AutoConfig.for_model(file.architecture, **fields)
    except Exception as error:  # whatever a wrong field breaks in there
        raise TCError(f"{file.path} has a header that makes no model: {error}") from error


def _missing(file: GgufFile) -> list[str]:
    """Header keys and tensors without which there is no configuration."""
    keys = [*SIZES.values(), EPSILON]
    problems = [
        f"the header has no {file.architecture}.{key}"
        for key in keys
        if file.model_header.get(key) is None
    ]
    if "token_embd.weight" not in file.tensors:
        problems.append("tensor token_embd.weight is missing")
    return problems


def _uneven(file: GgufFile) -> list[str]:
    keys = [*SIZES.values(), EPSILON, *OPTIONAL]
    values = {key: file.model_header.get(key, 1) for key in keys}
    return [
        f"{key} is {value!r}; only one positive number for all layers is allowed"
        for key, value in values.items()
        if not _positive(value)
    ]


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def head_dim_of(file: GgufFile) -> int:
    """Channels of a query head."""
    header = file.model_header
    implied = header["embedding_length"] // header["attention.head_count"]
    return int(header.get("attention.key_length", implied))


def _unrepresentable(file: GgufFile) -> list[str]:
    """What the header asks for and the converted model would not do."""
    head_dim, problems = head_dim_of(file), []
    for key in ("rope.dimension_count", "attention.value_length"):
        value = file.model_header.get(key, head_dim)
        if value != head_dim:
            problems.append(f"{key} is {value}, but only the head size, {head_dim}, is allowed")
    for key in ("attention.sliding_window", "expert_count", "attention.scale", "logit_scale"):
        if file.model_header.get(key):
            problems.append(
                f"{key} is {file.model_header.get(key)}; only models without it are allowed"
            )
    return problems + _rope_problems(file)


def _rope_problems(file: GgufFile) -> list[str]:
    kind = file.model_header.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        return [f"rope.scaling.type is {kind}; allowed: none, linear, and Llama 3's rope_freqs"]
    if file.model_header.get("rope.scale_linear", 1.0) != 1.0:
        return ["rope.scale_linear is an outdated key; write the file anew with rope.scaling.*"]
    freqs = "rope_freqs.weight" in file.tensors
    if freqs and kind != "none":
        return ["rope_freqs.weight and rope.scaling.type are both there; allowed: one of them"]
    if freqs and _llama3_scaling(file) is None:
        return ["rope_freqs.weight are not the factors of any Llama 3 model, so they are unknown"]
    return []


def _fields(file: GgufFile) -> dict[str, Any]:
    """The keyword arguments of the configuration."""
    header, head_dim = file.model_header, head_dim_of(file)
    heads = header["attention.head_count"]
    fields: dict[str, Any] = {name: int(header[key]) for name, key in SIZES.items()}
    fields |= {
        "num_key_value_heads": int(header.get("attention.head_count_kv", heads)),
        "rms_norm_eps": _shortest(header[EPSILON]),
        # The header's vocab_size is optional and has been wrong; the embedding has the last word.
        "vocab_size": int(file.tensors["token_embd.weight"].shape[-1]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope_parameters(file),
    }
    # Qwen2's configuration has no such field, though its attention obeys one.
    if file.architecture != "qwen2" or head_dim * heads != fields["hidden_size"]:
        fields["head_dim"] = head_dim
    if file.architecture == "llama":
        fields["attention_bias"] = any(".attn_" in n and n.endswith(".bias") for n in file.tensors)
    return fields | _token_ids(file)


def _token_ids(file: GgufFile) -> dict[str, int | None]:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    header = {name: f"tokenizer.ggml.{key}_token_id" for name, key in keys.items()}
    return {f"{name}_token_id": file.header.get(key) for name, key in header.items()}


def _shortest(value: float) -> float:
    """A float32 header value as the decimal that was meant: 1e-05, not 9.99999974e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def _rope_parameters(file: GgufFile) -> dict[str, Any]:
    base = {"rope_theta": _shortest(file.model_header.get("rope.freq_base", 10000.0))}
    if file.model_header.get("rope.scaling.type", "none") == "linear":
        factor = _shortest(file.model_header.get("rope.scaling.factor", 1.0))
        return base | {"rope_type": "linear", "factor": factor}
    if "rope_freqs.weight" in file.tensors:
        return base | {"rope_type": "llama3"} | (_llama3_scaling(file) or {})
    return base | {"rope_type": "default"}


def _llama3_scaling(file: GgufFile) -> dict[str, Any] | None:
    """Llama 3's rotary scaling behind the stored factors, or None if they come from another."""
    import numpy as np

    factors = dequantized(file, "rope_freqs.weight")
    theta = _shortest(file.model_header.get("rope.freq_base", 10000.0))
    scaling = LLAMA3 | {"factor": float(factors.max())}
    wanted = llama3_factors(theta, head_dim_of(file), scaling)
    same = factors.shape == wanted.shape and np.allclose(factors, wanted, rtol=1e-4)
    return scaling if same else None


def llama3_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> np.ndarray:
    """What each rotary frequency is divided by, as llama.cpp's converter writes it.

    Args:
        theta: rotary base.
        head_dim: channels of a head.
        scaling: `factor`, and the three values of `LLAMA3`.

    Returns:
        float64 of shape (head_dim / 2,), from 1 at high frequencies to `factor` at low ones.
    """
    import numpy as np

    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (scaling["original_max_position_embeddings"] / lengths - low) / (high - low)
    smooth = smooth.clip(0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
