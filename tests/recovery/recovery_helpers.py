"""A tiny teacher and student, a training text, and one stage of recovery over them."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composing import group
from transformers import PreTrainedModel

from tc.artifacts import Manifest, read_manifest, save_tensors
from tc.config import (
    EndToEndConfig,
    Precision,
    RecoveryConfig,
    RecoveryStageConfig,
    StudentConfig,
    TrainerConfig,
)
from tc.data import Packed, sequences_wanted
from tc.init import form_of, fresh_mixer
from tc.recovery import Stage, Watch, read_weights, run_stage, student_of
from tc.teacher import load_teacher

LAYERS = [0, 2]
T = 16
STEPS = 6


def recipe(name: str = "stage2", **values: Any) -> RecoveryConfig:
    """Six steps of four sequences, a checkpoint after each."""
    own = {"tokens": STEPS * 4 * T, "sequence_length": T, "batch_sequences": 4}
    outer = {k: values.pop(k) for k in list(values) if hasattr(RecoveryConfig(), k)}
    kinds = {"stage1": RecoveryStageConfig, "stage2": EndToEndConfig}
    stages = {name: kinds[name](**own | values)}
    return RecoveryConfig("test", **stages, checkpoint_tokens=1, validations=0, **outer)


def packed(num: int, seed: int) -> Packed:
    ids = torch.randint(0, 256, (num, T), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(T).repeat(num, 1)
    positions[-1, 6:] = torch.arange(T - 6)
    return Packed(ids, positions)


@dataclass
class Task:
    """What a stage is given; `run` may be called again, and goes on from what is there."""

    folder: Path
    teacher: PreTrainedModel
    cfg: RecoveryConfig
    name: str = "stage2"
    precision: Precision = Precision.float32

    def student(self) -> PreTrainedModel:
        layers = self.teacher.model.layers
        form = form_of(layers[0].self_attn, StudentConfig(), "auto")
        mixers = {
            i: fresh_mixer(copy.deepcopy(layers[i].self_attn).float(), i, form, seed=0)
            for i in LAYERS
        }
        return student_of(self.teacher, mixers, self.cfg, self.name, self.precision)

    def stage(self) -> Stage:
        training = self.folder / "training.safetensors"
        self.folder.mkdir(exist_ok=True)
        text = packed(sequences_wanted(self.cfg.stages[self.name]), 1)
        ids, positions = text.input_ids.int(), text.position_ids.int()
        save_tensors(training, {"input_ids": ids, "position_ids": positions})
        manifest = Manifest(f"recover {self.name}", {"made": "for a test"})
        return Stage(self.name, manifest, self.folder / self.name, training, packed(2, 2), 0)

    def run(self, watch: Watch | None = None) -> dict[str, torch.Tensor]:
        """The trained weights."""
        self.trained = self.student()
        trainer = TrainerConfig("test", precision=self.precision)
        run_stage(
            self.teacher, self.trained, self.stage(), self.cfg, trainer, False, watch or Watch()
        )
        return self.weights()

    @property
    def done(self) -> Path:
        return self.folder / self.name / "done"

    @property
    def info(self) -> dict[str, Any]:
        found = read_manifest(self.done)
        assert found is not None
        return found.info

    def weights(self) -> dict[str, torch.Tensor]:
        found = read_manifest(self.done)
        assert found is not None
        return read_weights(self.done, found)


def teacher(cache: Path, name: str = "random_llama", *overrides: str) -> PreTrainedModel:
    return load_teacher(group("teacher", name, *overrides), cache).model


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def stopping_after(steps: int, number: int, said: list[str] | None = None) -> Watch:
    """Sends this process a signal while step `steps` ends."""
    seen = []

    def tokens(count: int) -> None:
        seen.append(count)
        if len(seen) == steps + 1:  # the first call says what was done before
            os.kill(os.getpid(), number)

    return Watch(tokens=tokens, say=[].append if said is None else said.append)
