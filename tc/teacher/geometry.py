"""The sizes of a teacher, and whether they are the ones that its configuration states."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tc.config import GeometryConfig, TeacherConfig
from tc.errors import TCError, one_message

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def geometry_of(config: PreTrainedConfig, parameters: int) -> GeometryConfig:
    """Reads the sizes from a model's configuration.

    Args:
        config: of a decoder-only model.
        parameters: all parameters, tied ones counted once.
    """
    heads = config.num_attention_heads
    return GeometryConfig(
        num_hidden_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        parameters=parameters,
    )


def empty_model(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Builds a causal model on the meta device: shapes and names, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **options)
    # Transformers finds out here that a field means nothing to it, and raises whatever that breaks.
    except Exception as error:
        raise TCError(
            f"the teacher's configuration makes no {config.model_type} model: "
            f"{type(error).__name__}: {error}. Correct its config.json, or teacher.model."
        ) from error


def count_parameters(model: PreTrainedModel) -> int:
    """All parameters of a model, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def check_agrees(cfg: TeacherConfig, found: GeometryConfig) -> None:
    """Checks sizes that a configuration states against the teacher's own.

    Raises:
        TCError: naming each size that differs.
    """
    if cfg.geometry is None:
        return
    stated, real = asdict(cfg.geometry), asdict(found)
    problems = [
        f"teacher.geometry.{key} is {stated[key]}, but the teacher has {real[key]}"
        for key in real
        if stated[key] != real[key]
    ]
    if problems:
        raise one_message(
            problems,
            f"teacher {cfg.name!r} is not the model that its configuration describes; correct "
            "teacher.geometry (or set it to null), or the path:",
        )
