"""Times stage 2 of recovery against the bound of one teacher and three student forward passes.

python experiments/speed/time_recovery.py [--lengths 512 2048]

One sequence a step, float32, two threads, every4; everything but the mixers is frozen, as in the
default run.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

# As `run.py` does, before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from measuring import copied_mixers, load_embedded, parse_arguments, show, write

from tc.artifacts import Manifest, save_tensors
from tc.config import Config
from tc.data import Packed
from tc.meter import median_seconds
from tc.recovery import Stage, Watch, run_stage, student_of
from tc.teacher import Teacher

LENGTHS = (512, 2048)
OPTIMIZERS = ("adamw", "muon")
STEPS, WARM_UP, REPEATS = 8, 2, 5


def measure(optimizer: str, length: int) -> dict[str, Any]:
    """One row: seconds of a step, and of what the bound is made of, before and after."""
    config, teacher = load_embedded(
        "recovery=quick",
        f"recovery.stage2.optimizer={optimizer}",
        f"recovery.stage2.sequence_length={length}",
        f"recovery.stage2.tokens={STEPS * length}",
        "recovery.validations=0",
    )
    mixers = copied_mixers(config, teacher, config.policy)
    student = student_of(teacher.model, mixers, config.recovery, "stage2", config.trainer.precision)
    ids = torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    calls = {
        name: torch.no_grad()(lambda model=model: model(ids, use_cache=False).logits)
        for name, model in (("teacher", teacher.model), ("student", student))
    }
    before = median_seconds(calls, REPEATS)
    step = seconds_of_a_step(config, teacher, student, ids)
    after = median_seconds(calls, REPEATS)
    forward = {name: (before[name] + after[name]) / 2 for name in calls}
    bound = forward["teacher"] + 3 * forward["student"]
    return {
        "tokens": length,
        "optimizer": optimizer,
        "teacher_forward_s": forward["teacher"],
        "student_forward_s": forward["student"],
        "bound_s": bound,
        "step_s": step,
        "share_of_bound": bound / step,
        "tokens_per_s": length / step,
    }


def seconds_of_a_step(config: Config, teacher: Teacher, student: Any, ids: torch.Tensor) -> float:
    """The median over the steps of a whole stage, but for the first ones."""
    marks: list[float] = []
    watch = Watch(tokens=lambda _: marks.append(time.perf_counter()))
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    with tempfile.TemporaryDirectory() as folder:
        training = Path(folder, "training.safetensors")
        text = {"input_ids": ids.expand(STEPS, -1), "position_ids": positions.expand(STEPS, -1)}
        save_tensors(training, {name: x.int().contiguous() for name, x in text.items()})
        stage = Stage(
            name="stage2",
            manifest=Manifest("recover stage2", {"made": "to be timed"}),
            folder=Path(folder, "stage2"),
            training=training,
            validation=Packed(ids[:, :2], positions[:, :2]),
            seed=0,
        )
        run_stage(teacher.model, student, stage, config.recovery, config.trainer, False, watch)
    took = [after - before for before, after in pairwise(marks)]
    return statistics.median(took[WARM_UP:])


def main() -> None:
    """Measures and writes all rows."""
    torch.set_num_threads(2)
    arguments = parse_arguments(__doc__, LENGTHS)
    rows = [show(measure(o, length)) for length in arguments.lengths for o in OPTIMIZERS]
    write(arguments.output, rows)


if __name__ == "__main__":
    main()
