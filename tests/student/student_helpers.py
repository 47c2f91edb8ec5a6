"""Tiny random teachers of every supported architecture, and students of them.

Shape letters: B batch, T tokens, L layers.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from composing import CONF, group
from transformers import PreTrainedModel

from tc.config import StudentConfig, TeacherConfig, TeacherSource
from tc.init import form_of, fresh_mixer
from tc.student.hybrid import build_student
from tc.teacher import SUPPORTED, load_teacher

SHIPPED = {
    path.stem.removeprefix("random_"): path.stem for path in CONF.glob("teacher/random_*.yaml")
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
}
EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
}
ARCHITECTURES = sorted(SUPPORTED)
WHICH = ("even", "odd", "all")
"""Which layers are converted: with and without attention in the first one, and no attention."""
PAD = 7
"""A letter as any other: the embedding of the pad token proper is zero, and writes nothing."""


def teacher_cfg(architecture: str) -> TeacherConfig:
    if architecture not in SHIPPED:
        return TeacherConfig(
            name=architecture,
            source=TeacherSource.random,
            architecture=architecture,
            model=SIZES | EXPERTS.get(architecture, {}),
        )
    cfg = group("teacher", SHIPPED[architecture])
    assert isinstance(cfg, TeacherConfig)
    return cfg


@cache
def teacher(architecture: str) -> PreTrainedModel:
    """Loaded once: no test may change it."""
    return load_teacher(teacher_cfg(architecture), Path("/nowhere")).model


def layers_of(architecture: str, which: str) -> list[int]:
    num_layers = teacher(architecture).config.num_hidden_layers
    chosen = {"even": (0, 2), "odd": (1, 2), "all": (0, 1), "none": (num_layers, 1)}[which]
    return list(range(chosen[0], num_layers, chosen[1]))


def student(architecture: str, which: str = "odd", **student_cfg) -> PreTrainedModel:
    """A `copy_only` student; its kept weights are the shared teacher's."""
    source, mixers = teacher(architecture), {}
    for i in layers_of(architecture, which):
        attention = source.model.layers[i].self_attn
        form = form_of(attention, StudentConfig(name="test", **student_cfg), "auto")
        mixers[i] = fresh_mixer(attention, i, form, seed=0)
        with torch.no_grad():  # fresh states forget within a few tokens; these do not
            mixers[i].A_log.sub_(1)
    return build_student(source, mixers, {"made_by": "test"})


def tokens(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Rows of random bytes, `[1, length]` each."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (1, length), generator=draw) for length in lengths]


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, T]` of rows with pads on one side."""
    T = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), T), PAD)
    mask = torch.zeros(len(rows), T, dtype=torch.long)
    for b, row in enumerate(rows):
        place = slice(T - row.shape[1], T) if side == "left" else slice(0, row.shape[1])
        ids[b, place], mask[b, place] = row[0], 1
    return ids, mask


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor, **inputs) -> torch.Tensor:
    return model(ids, **inputs).logits
