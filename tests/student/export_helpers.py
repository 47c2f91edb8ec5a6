"""Small saved students of chosen shapes, as a run leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from student_helpers import EXPERTS
from transformers import PreTrainedModel

from tc.config import StudentConfig, TeacherConfig, TeacherSource
from tc.init import form_of, fresh_mixer
from tc.student.hybrid import build_student
from tc.teacher import load_teacher

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
BY_TYPE = EXPERTS | {
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
FLA = {"carry_bias": False, "carry_qk_norm": False, "norm_eps": 1e-6}
"""What `student=fla` leaves out, and the epsilon of the blocks."""


def save_student(
    folder: Path,
    architecture: str = "llama",
    layers: tuple[int, ...] = (0, 2),
    student: dict[str, Any] | None = None,
    shards: str = "50GB",
    dtype: torch.dtype = torch.float32,
    **model: Any,
) -> PreTrainedModel:
    """Makes an untrained student, its tokenizer beside it, and returns it.

    Args:
        folder: where it is saved.
        architecture: of the teacher.
        layers: the converted ones.
        student: fields of `StudentConfig`.
        shards: the size of a file of weights.
        dtype: of the weights.
        **model: fields of the teacher's configuration.
    """
    cfg = TeacherConfig(
        name="small",
        source=TeacherSource.random,
        architecture=architecture,
        model=SIZES | BY_TYPE.get(architecture, {}) | model,
    )
    teacher = load_teacher(cfg, Path("/nowhere"))
    teacher.model.to(dtype)
    mixers = {}
    for i in layers:
        attention = teacher.model.model.layers[i].self_attn
        form = form_of(attention, StudentConfig(name="test", **(student or {})), "auto")
        mixers[i] = fresh_mixer(attention, i, form, seed=i)
        with torch.no_grad():
            mixers[i].A_log.sub_(1)
            mixers[i].o_norm.weight.uniform_(0.5, 2)
    provenance = {
        "version": "0.1.0",
        "teacher_name": "small",
        "teacher": teacher.identity,
        "policy": "layers",
        "init": "copy_only",
        "seed": 0,
    }
    made = build_student(teacher.model, mixers, provenance)
    made.save_pretrained(folder, max_shard_size=shards)
    teacher.tokenizer.save_pretrained(folder)
    return made
