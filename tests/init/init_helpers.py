"""Layers of tiny random teachers, with what a calibration of them holds."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from composing import CONF, RANDOM_TEACHERS, config, group
from torch import nn

from tc.config import InitConfig, StudentConfig
from tc.data import Packed
from tc.init import form_of, fresh_mixer
from tc.stats import Calibration, LayerBatch, calibrate
from tc.student.mixer import GatedDeltaNet
from tc.teacher import load_teacher

TEACHERS = RANDOM_TEACHERS
PRESETS = sorted(path.stem for path in (CONF / "init").glob("*.yaml"))
TOKENS = 48
"""Tokens of a sequence; the last sequence of each part holds two documents."""


@dataclass
class Layer:
    """One teacher layer and what it saw and said."""

    attention: nn.Module
    statistics: dict[str, torch.Tensor]
    parts: dict[str, LayerBatch]
    index: int

    @property
    def calibration(self) -> LayerBatch:
        return self.parts["calibration"]

    @property
    def selection(self) -> LayerBatch:
        return self.parts["selection"]

    def mixer(self, seed: int = 0, **student: bool) -> GatedDeltaNet:
        form = form_of(self.attention, StudentConfig(**student), "auto")
        return fresh_mixer(self.attention, self.index, form, seed).requires_grad_(False)


def calibrated(name: str, folder: Path, *overrides: str) -> list[Layer]:
    """Every layer of a random teacher, from 12 calibration and 4 selection sequences."""
    model = load_teacher(group("teacher", name, *overrides), folder).model
    calibrate(model, {"calibration": packed(12, 1), "selection": packed(4, 2)}, folder)
    held = Calibration(folder)
    return [
        Layer(
            copy.deepcopy(layer.self_attn).float(),
            held.statistics(i),
            {part: batch.to("cpu") for part, batch in held.layer(i).items()},
            i,
        )
        for i, layer in enumerate(model.model.layers)
    ]


def packed(num: int, seed: int) -> Packed:
    ids = torch.randint(0, 256, (num, TOKENS), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(TOKENS).repeat(num, 1)
    positions[-1, 20:] = torch.arange(TOKENS - 20)
    return Packed(ids, positions)


def preset(name: str) -> InitConfig:
    """A shipped init, composed with the whole default configuration around it."""
    return config(f"init={name}", "run_dir=x").init


def closeness(student: torch.Tensor, teacher: torch.Tensor) -> float:
    """||student - teacher||^2 / ||teacher||^2, in float64."""
    gap = (student.double() - teacher.double()).square().sum()
    return float(gap / teacher.double().square().sum())
