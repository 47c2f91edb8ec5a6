"""A GGUF file, made a Hugging Face folder once and found there ever after.

llama.cpp stores the rows of `q` and `k` of its `llama` models in the order of its own rotary
layout, which pairs neighbours (0, 1), (2, 3); transformers pairs halves (0, d/2), (1, d/2 + 1). The
order is undone here. Its `qwen2` and `qwen3` models pair halves already.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tc.artifacts import Manifest, disk_errors, find, writing
from tc.errors import one_message
from tc.locks import locked
from tc.teacher.convertible import check_convertible
from tc.teacher.geometry import empty_model
from tc.teacher.gguf_config import config_of
from tc.teacher.gguf_file import GgufFile, checked_hash, dequantized, open_gguf
from tc.teacher.gguf_tokenizer import tokenizer_of

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

CONVERTER = 1
"""To be raised whenever the converted folder of a given file would change."""

OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(path: Path, cache_dir: Path, sha256: str | None = None) -> Path:
    """Converts a GGUF file to a Hugging Face folder, or finds the folder of an earlier call.

    Weights are kept in float32: dequantized values are float32 by definition (scale times integer
    plus offset), and any shorter type would make another model of them. `load_teacher` casts to
    `teacher.dtype` as it reads.

    Args:
        path: the file.
        cache_dir: folders are made below `cache_dir/teachers`.
        sha256: the hash that the file must have, or None for any.

    Returns:
        A folder for `from_pretrained`: config, float32 safetensors, tokenizer, and the manifest.

    Raises:
        TCError: if the file is missing, not the expected one, damaged, or of a kind that is not
            read; or if an earlier folder was damaged since.
    """
    path = Path(path)
    digest = checked_hash(path, sha256)
    manifest = Manifest("teacher", {"gguf_sha256": digest, "converter": CONVERTER})
    folder = Path(cache_dir) / "teachers" / f"{path.stem}-{manifest.key}"
    if find(folder, manifest) is None:
        with disk_errors(folder.parent), locked(folder, "the converted teacher", say=log.warning):
            if find(folder, manifest) is None:  # another run may have made it in the meantime
                _convert(open_gguf(path), folder, manifest)
    return folder


def _convert(file: GgufFile, folder: Path, manifest: Manifest) -> None:
    config = config_of(file)
    check_convertible(config)
    tokenizer = tokenizer_of(file)
    model = model_of(file, config)
    with writing(folder, manifest) as fresh:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)


def model_of(file: GgufFile, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a GGUF file in float32, whose rotary buffers stay on the meta device.

    Raises:
        TCError: if a tensor is missing, not known or of another shape.
    """
    model = empty_model(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = {name: hf_name(name) for name in file.tensors if name != "rope_freqs.weight"}
    _check_tensors(file, names, shapes)
    state = {target: tensor_of(file, name, config) for name, target in names.items() if target}
    state |= _zeros(shapes, state)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model


def hf_name(name: str) -> str | None:
    """The transformers name of a GGUF tensor, or None if there is none.

    `blk.3.attn_q.bias` is `model.layers.3.self_attn.q_proj.bias`.
    """
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None:
        return None
    layer, part, kind = found.groups()
    target = OUTSIDE.get(part) if layer is None else INSIDE.get(part)
    where = "" if layer is None else f"model.layers.{layer}."
    return None if target is None else f"{where}{target}.{kind}"


def _check_tensors(
    file: GgufFile, names: dict[str, str | None], shapes: dict[str, tuple[int, ...]]
) -> None:
    problems = [f"{name} is missing" for name in _absent(names, shapes)]
    for name, target in names.items():
        # GGUF lists dimensions from the fastest to the slowest.
        shape = tuple(int(n) for n in reversed(file.tensors[name].shape))
        if target not in shapes:
            problems.append(f"{name} is not part of a {file.architecture} model")
        elif shape != shapes[target]:
            problems.append(f"{name} has shape {shape}, not {shapes[target]}")
    if problems:
        raise one_message(
            problems[:20],
            f"{file.path} does not hold the tensors that its header promises; get the file again, "
            "or use teacher.source=hf with the original weights:",
        )


def _absent(names: dict[str, str | None], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Parameters that no tensor fills, but for biases that `_zeros` may fill."""
    absent = set(shapes) - set(names.values())
    return sorted(name for name in absent if not _may_be_zero(name))


def _may_be_zero(name: str) -> bool:
    # A transformers Llama has biases on all four projections or on none; llama.cpp also on some.
    return name.endswith("o_proj.bias")


def _zeros(
    shapes: dict[str, tuple[int, ...]], state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    import torch

    return {name: torch.zeros(shape) for name, shape in shapes.items() if name not in state}


def tensor_of(file: GgufFile, name: str, config: PreTrainedConfig) -> torch.Tensor:
    """A tensor of the file in float32, with its rows in the order of transformers."""
    import torch

    values = dequantized(file, name)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = name.split(".")[-2]
    if file.architecture == "llama" and part in heads:
        values = unpermuted(values, heads[part])
    return torch.from_numpy(values)


def unpermuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of rotary rows: pairs of neighbours become pairs of halves.

    Args:
        values: of shape (num_heads * head_dim, ...): a projection's weight or bias.
        num_heads: its own heads, so the key heads for `k`.

    Returns:
        The same shape; row 2i + j of a head has become row j * head_dim / 2 + i.
    """
    import numpy as np

    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
