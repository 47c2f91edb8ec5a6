"""What recovery takes of memory at 1, 2 and 4 processes, beside what `dry_run` says.

    python experiments/scale/measure.py [--worlds 1 2 4] [--output out/scale/measured.json]

A random Llama on a CPU, FSDP over gloo, float32, two steps of stage 2. Resident memory of every
process is looked at every 50 ms, first while teacher and student are made, then while it trains;
what libraries take is subtracted on both sides.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer  # noqa: F401  counted as the program, not as what a run holds

from tc.artifacts import Manifest, save_tensors, write_json
from tc.config import Config, register, typed
from tc.data import Packed
from tc.init import form_of, fresh_mixer
from tc.meter import Meter
from tc.plan import PROGRAM_BYTES, RecoveryCost, mixer_parameters, recovery_costs
from tc.recovery import Stage, Watch, run_stage, student_of
from tc.teacher import load_teacher, read_geometry

CONF = Path(__file__).resolve().parents[2] / "conf"
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
STEPS = 2
CASES = {
    "all": ["sequence_length=64", "batch_sequences=4", "micro_sequences=1", "lr_rest=1e-4"],
    "mixers": ["sequence_length=64", "batch_sequences=4", "micro_sequences=1", "lr_rest=0"],
}


def overrides(sizes: dict[str, int], own: list[str], world: int = 1) -> list[str]:
    """Of a run that trains a random Llama of these sizes."""
    model = ",".join(f"{name}:{value}" for name, value in sizes.items())
    trainer = [] if world == 1 else ["trainer=fsdp", f"trainer.devices={world}"]
    return [
        *("teacher=random_llama", f"+teacher.model={{{model}}}", "policy=none"),
        *("recovery=quick", "recovery.stage2.optimizer=adamw"),
        *(f"recovery.stage2.{pair}" for pair in own),
        *trainer,
        *("trainer.accelerator=cpu", "trainer.precision=float32"),
    ]


def configuration(given: list[str]) -> Config:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return typed(compose("config", overrides=given))


def told(given: list[str]) -> RecoveryCost:
    """What the estimator of `dry_run` says of stage 2."""
    run = configuration(given)
    geometry = read_geometry(run.teacher)
    mixers = geometry.num_hidden_layers * mixer_parameters(geometry, run.student.use_gate)
    return recovery_costs(run, geometry, mixers)["stage2"]


def taken(folder: Path, given: list[str]) -> dict[str, int]:
    """Bytes that this process takes at its peak: while it makes the models, and while it trains."""
    torch.set_num_threads(1)
    run = configuration(given)
    cfg = run.recovery.stage2
    rank = int(os.environ.get("RANK", "0"))
    ids = torch.randint(0, 256, (STEPS * cfg.batch_sequences, cfg.sequence_length))
    positions = torch.arange(cfg.sequence_length).expand_as(ids).contiguous()
    training = folder / f"training{rank}.safetensors"
    save_tensors(training, {"input_ids": ids.int(), "position_ids": positions.int()})
    gc.collect()
    before = psutil.Process().memory_info().rss
    with Meter() as loading:
        teacher = load_teacher(run.teacher, folder).model
        layers = teacher.model.layers
        form = form_of(layers[0].self_attn, run.student, "auto")
        mixers = {i: fresh_mixer(layers[i].self_attn, i, form, 0) for i in range(len(layers))}
        student = student_of(teacher, mixers, run.recovery, "stage2", run.trainer.precision)
    with Meter() as fitting:
        manifest = Manifest("recover stage2", {"made": "to be measured"})
        held_out = Packed(ids[:1, :8], positions[:1, :8])
        stage = Stage("stage2", manifest, folder / "stage2", training, held_out, 0)
        run_stage(teacher, student, stage, run.recovery, run.trainer, False, Watch())
    left = psutil.Process().memory_info().rss
    return {
        "loading": loading.peak_rss_bytes - before,
        "peak": max(loading.peak_rss_bytes, fitting.peak_rss_bytes) - before,
        "end": left - before,
    }


def measured(given: list[str], world: int) -> list[dict[str, int]]:
    """The same of every process of a run, each a process of its own, started as torchrun would."""
    context = multiprocessing.get_context("forkserver")  # which imports once for all of them
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        folder = Path(name)
        workers = [
            context.Process(target=_worker, args=(folder, given, rank, world, port))
            for rank in range(world)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise RuntimeError(f"a process failed: {[worker.exitcode for worker in workers]}")
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


def _worker(folder: Path, given: list[str], rank: int, world: int, port: int) -> None:
    # Blocks of a MiB or more go back to the system when they are freed.
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**20)
    libc.malloc_trim(0)
    if world > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        worlds = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "TORCHELASTIC_RUN_ID": "scale"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {k: str(v) for k, v in (ranks | worlds | place).items()}
    write_json(folder / f"rank{rank}.json", taken(folder, given))


def row(name: str, world: int) -> dict[str, Any]:
    """One case at a number of processes: estimates, measurements of the worst process, ratios."""
    given = overrides(SIZES, CASES[name], world)
    cost, found = told(given), measured(given, world)
    loading = max(each["loading"] for each in found)
    peak = max(each["peak"] for each in found)
    own = cost.memory.total - PROGRAM_BYTES
    started = cost.loading_bytes - PROGRAM_BYTES
    return {
        "trained": name,
        "processes": world,
        "told_loading": started,
        "taken_loading": loading,
        "told_training": own,
        "told_peak": max(own, started),
        "taken_peak": peak,
        "ratio_loading": round(started / loading, 2),
        "ratio_peak": round(max(own, started) / peak, 2),
    }


def main() -> None:
    """Measures all cases, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows = []
    for name in CASES:
        for world in given.worlds:
            rows.append(row(name, world))
            print(rows[-1], flush=True)
            if given.output is not None:
                given.output.parent.mkdir(parents=True, exist_ok=True)
                write_json(given.output, rows)


if __name__ == "__main__":
    main()
