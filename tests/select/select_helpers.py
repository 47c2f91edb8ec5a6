"""Tiny teachers with a mixer of every layer, and the plain way to a loss: build, run, compare."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import torch
from composing import group
from transformers import PreTrainedModel

from tc.config import StudentConfig
from tc.data import Packed
from tc.init import form_of, fresh_mixer
from tc.recovery.losses import IGNORED
from tc.recovery.model import next_tokens
from tc.student.hybrid import build_student
from tc.student.mixer import GatedDeltaNet
from tc.teacher import load_teacher

NAMES = ["random_llama", "random_qwen2", "random_qwen3", "random_mistral", "random_qwen3_moe"]
T = 24


@cache
def teacher(name: str = "random_llama", dtype: str = "float32") -> PreTrainedModel:
    """Of four layers; no test may change it."""
    options = ["teacher.model.num_hidden_layers=4", f"teacher.dtype={dtype}"]
    return load_teacher(group("teacher", name, *options), Path("/nowhere")).model


def mixers(model: PreTrainedModel) -> dict[int, GatedDeltaNet]:
    """Of every layer, each with a memory of its own length, so that no two layers are alike."""
    layers = [copy.deepcopy(layer.self_attn).float() for layer in model.model.layers]
    form = form_of(layers[0], StudentConfig(), "auto")
    made = {i: fresh_mixer(attention, i, form, seed=0) for i, attention in enumerate(layers)}
    for i, mixer in made.items():
        with torch.no_grad():
            mixer.A_log.sub_(i)
    return made


def packed(num: int = 6, seed: int = 1) -> Packed:
    """More sequences than go through a layer at once, the last one of two documents."""
    ids = torch.randint(0, 256, (num, T), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(T).repeat(num, 1)
    positions[-1, 9:] = torch.arange(T - 9)
    return Packed(ids, positions)


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, tokens: Packed) -> torch.Tensor:
    """`[N, T, V]`, float64."""
    given = {"input_ids": tokens.input_ids, "position_ids": tokens.position_ids}
    return model(**given, use_cache=False).logits.double().log_softmax(-1)


def plain_kl(model: PreTrainedModel, kept: tuple[int, ...], tokens: Packed) -> float:
    """KL(teacher || student) of a student that is built as the pipeline builds it."""
    converted = {i: mixer for i, mixer in mixers(model).items() if i not in kept}
    p = log_probabilities(build_student(model, converted, {}), tokens)
    q = log_probabilities(model, tokens)
    return float((q.exp() * (q - p)).sum(-1).mean())


def plain_nll(model: PreTrainedModel, bypassed: tuple[int, ...], tokens: Packed) -> float:
    """Of a teacher whose o_proj is zero in some layers."""
    other = copy.deepcopy(model)
    for i in bypassed:
        for value in other.model.layers[i].self_attn.o_proj.parameters():
            value.data.zero_()
    targets = next_tokens(tokens.input_ids, tokens.position_ids)
    counted = targets != IGNORED
    found = log_probabilities(other, tokens).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return float(-found[counted].mean())
