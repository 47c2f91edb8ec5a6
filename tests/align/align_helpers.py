"""A layer of a tiny random teacher, and a mixer to align to it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from composing import RANDOM_TEACHERS, group
from torch import nn

from tc.config import AlignConfig, StudentConfig
from tc.data import Packed
from tc.init import form_of, fresh_mixer
from tc.stats import Calibration, LayerBatch, calibrate
from tc.student.mixer import GatedDeltaNet
from tc.teacher import load_teacher

TEACHERS = RANDOM_TEACHERS
INDEX = 1


@dataclass
class Task:
    """What an alignment is given."""

    attention: nn.Module
    parts: dict[str, LayerBatch]

    def mixer(self) -> GatedDeltaNet:
        form = form_of(self.attention, StudentConfig(), "auto")
        return fresh_mixer(self.attention, INDEX, form, seed=0)


def task(name: str, folder: Path) -> Task:
    """Layer 1 of a random teacher: 8 calibration and 3 selection sequences of 32 tokens."""
    model = load_teacher(group("teacher", name), folder).model
    calibrate(model, {"calibration": packed(8, 1), "selection": packed(3, 2)}, folder)
    parts = Calibration(folder).layer(INDEX)
    attention = copy.deepcopy(model.model.layers[INDEX].self_attn)
    return Task(attention, {part: batch.to("cpu") for part, batch in parts.items()})


def packed(num: int, seed: int) -> Packed:
    ids = torch.randint(0, 256, (num, 32), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(32).repeat(num, 1)
    positions[-1, 12:] = torch.arange(20)
    return Packed(ids, positions)


def settings(**values: object) -> AlignConfig:
    """Few steps, looked at after each."""
    small = {"steps": 8, "check_every": 1, "batch_sequences": 2}
    return AlignConfig(**small | values)
