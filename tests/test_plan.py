"""What `dry_run` says that recovery needs, beside what it takes."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path

import psutil
import pytest
import torch
from composing import config
from lightning.pytorch import Trainer  # noqa: F401  counted as the program, not as what a run holds

from tc.artifacts import Manifest, save_tensors
from tc.data import Packed
from tc.init import form_of, fresh_mixer
from tc.meter import Meter
from tc.plan import PROGRAM_BYTES, mixer_parameters, recovery_memory
from tc.recovery import Stage, Watch, run_stage, student_of
from tc.teacher import load_teacher, read_geometry

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
STEPS = 2


def overrides(*own: str) -> list[str]:
    model = ",".join(f"{name}:{value}" for name, value in SIZES.items())
    stage = [f"recovery.stage2.{pair}" for pair in own]
    return ["teacher=random_llama", f"+teacher.model={{{model}}}", "recovery=quick", *stage]


def peak(folder: Path, given: list[str]) -> int:
    """Bytes that two steps of stage 2 take at their peak, the teacher included."""
    torch.set_num_threads(1)
    run = config(*given)
    gc.collect()
    before = psutil.Process().memory_info().rss
    with Meter() as meter:
        teacher = load_teacher(run.teacher, folder).model
        layers = teacher.model.layers
        form = form_of(layers[0].self_attn, run.student, "auto")
        mixers = {i: fresh_mixer(layers[i].self_attn, i, form, 0) for i in range(len(layers))}
        student = student_of(teacher, mixers, run.recovery, "stage2", run.trainer.precision)
        cfg = run.recovery.stage2
        ids = torch.randint(0, 256, (STEPS * cfg.batch_sequences, cfg.sequence_length))
        positions = torch.arange(cfg.sequence_length).expand_as(ids)
        training = folder / "training.safetensors"
        text = {"input_ids": ids.int(), "position_ids": positions.int().contiguous()}
        save_tensors(training, text)
        manifest = Manifest("recover stage2", {"made": "for a test"})
        held_out = Packed(ids[:1, :8], positions[:1, :8])
        stage = Stage("stage2", manifest, folder / "stage2", training, held_out, 0)
        run_stage(teacher, student, stage, run.recovery, run.trainer, False, Watch())
    return meter.peak_rss_bytes - before


@pytest.mark.parametrize(
    "own",
    [
        ["sequence_length=2048", "batch_sequences=1", "lr_rest=0"],
        ["sequence_length=512", "batch_sequences=1", "lr_rest=1e-4"],
        ["sequence_length=512", "batch_sequences=8", "micro_sequences=2", "lr_rest=1e-4"],
    ],
)
def test_memory_of_recovery_is_what_it_takes(own: list[str], tmp_path: Path) -> None:
    given = [*overrides(*own), "policy=none", "recovery.stage2.optimizer=adamw"]
    run = config(*given)
    geometry = read_geometry(run.teacher)
    mixers = geometry.num_hidden_layers * mixer_parameters(geometry, run.student.use_gate)
    told = recovery_memory(run, geometry, mixers)
    assert told is not None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        taken = pool.apply(peak, (tmp_path, given))
    ratio = (told - PROGRAM_BYTES) / taken
    print(f"{own}: told {(told - PROGRAM_BYTES) / 1e6:.0f} MB, taken {taken / 1e6:.0f} MB")
    assert 0.7 < ratio < 1.6
