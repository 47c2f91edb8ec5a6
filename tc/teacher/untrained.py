"""Tiny models of random weights, with a byte-level tokenizer, for tests and dry runs."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from tc.config import TeacherConfig
from tc.errors import TCError, one_message
from tc.teacher.convertible import SUPPORTED, size_problems
from tc.teacher.geometry import empty_model

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCABULARY = 257
"""The 256 bytes, and one token that ends a text and pads."""


def random_config(cfg: TeacherConfig) -> PreTrainedConfig:
    """The configuration of a random teacher.

    Raises:
        TCError: if the architecture is not convertible, or a field is unknown or has a wrong value.
    """
    from transformers import AutoConfig

    if cfg.architecture not in SUPPORTED:
        raise TCError(
            f"teacher.architecture is {cfg.architecture!r}; allowed for a random teacher: "
            f"{', '.join(SUPPORTED)}."
        )
    _check_fields(cfg)
    ends = {"bos_token_id": None, "eos_token_id": VOCABULARY - 1, "pad_token_id": VOCABULARY - 1}
    fields = {"vocab_size": VOCABULARY, **ends, **cfg.model}
    if problems := size_problems(fields):
        raise one_message(problems, f"teacher {cfg.name!r} cannot be made (teacher.model):")
    try:
        return AutoConfig.for_model(cfg.architecture, **fields)
    except Exception as error:  # whatever a wrong field breaks in there
        raise TCError(
            f"teacher.model does not make a {cfg.architecture} configuration: {error}"
        ) from error


def _check_fields(cfg: TeacherConfig) -> None:
    """Transformers takes any field and ignores those that it does not know; this does not."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(cfg.architecture)
    # Every attention module of SUPPORTED obeys head_dim, whether or not its configuration lists it.
    known = {*default.to_dict(), *default.attribute_map, "head_dim"} - {"model_type"}
    problems = [
        f"teacher.model.{key} is not a field of {cfg.architecture}; nearest are "
        f"{', '.join(get_close_matches(key, known)) or 'none'}"
        for key in cfg.model
        if key not in known
    ]
    size = cfg.model.get("vocab_size", VOCABULARY)
    if isinstance(size, int) and size < VOCABULARY:
        problems.append(
            f"teacher.model.vocab_size is {size}; the byte tokenizer needs {VOCABULARY} or more "
            "(leave it out)"
        )
    if problems:
        raise one_message(problems, f"teacher {cfg.name!r} cannot be made:")


def random_model(
    cfg: TeacherConfig, config: PreTrainedConfig, empty: bool = False
) -> PreTrainedModel:
    """Draws a model from `cfg.seed`, leaving torch's global generator as it was.

    Args:
        cfg: which one.
        config: of `random_config`.
        empty: build it on the meta device, and draw nothing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if empty:
        dtype = getattr(torch, cfg.dtype.value)
        return empty_model(config, dtype=dtype, attn_implementation="sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        # Always drawn in float32, so that a seed means the same weights in every dtype.
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
        enliven(model)
    return model.to(getattr(torch, cfg.dtype.value))


def enliven(model: nn.Module) -> None:
    """Draws biases and norm weights, which are 0 and 1 at first, so that losing one shows."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.2)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)


def random_identity(cfg: TeacherConfig) -> dict[str, str]:
    """What the weights of a random teacher follow from."""
    fields = json.dumps(cfg.model, sort_keys=True, default=str)
    return {"random": str(cfg.architecture), "model": fields, "seed": str(cfg.seed)}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token ids are the bytes of the UTF-8 text; 256 ends and pads."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(_byte_vocabulary(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, normalized=False, special=True)])
    ends: dict[str, Any] = {"eos_token": END, "pad_token": END}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **ends
    )


def _byte_vocabulary() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
