"""Run folders that are written, not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCIENCE = {
    "teacher.name": "tiny",
    "init.name": "full",
    "init.align": True,
    "policy.name": "every4",
    "policy.keep": None,
    "seed": 0,
}


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def write_run(
    path: Path, perplexity: float | None = 20.0, layers: int = 4, points: int = 6, **science: Any
) -> Path:
    """A run folder as the pipeline leaves it; without a perplexity, one that is not finished."""
    facts = {**SCIENCE, **{key.replace("__", "."): value for key, value in science.items()}}
    write(path / "science.json", facts)
    write(path / "config.yaml", "seed: 0\nstages:\n- data\n- student\n- evaluate\nrun_dir: x\n")
    write(
        path / "environment.json",
        {"git_commit": "a" * 40, "git_dirty": False, "code": "c0de", "packages": {"torch": "2"}},
    )
    for layer in range(1, layers):
        health = {"half_life": 2.0 * layer, "beta": 0.2, "gate_rms": 0.5, "state_norm": 1.0}
        info = {"error": 0.5, "health": health}
        write(path / f"init/layer_{layer:03d}/manifest.json", {"kind": "initialise", "info": info})
        info = {"error": 0.1 * layer, "history": [[0, 0.5], [16, 0.1 * layer]], "health": health}
        write(path / f"align/layer_{layer:03d}/manifest.json", {"kind": "align", "info": info})
    if perplexity is None:
        return path
    history = [
        {
            "step": i,
            "tokens": 512 * i,
            "perplexity": perplexity + 10 / (i + 1),
            "perplexity_over_teacher": (perplexity + 10 / (i + 1)) / 10,
            "loss": 1 / (i + 1),
            # Looks are few, whatever the steps.
            **{f"health/half_life/layer_{n}": 3.0 + i for n in range(1, layers) if i < 6},
        }
        for i in range(points)
    ]
    manifest = {"kind": "recover stage2", "info": {"history": history}}
    write(path / "recover/stage2/done/manifest.json", manifest)
    metrics = {
        "teacher/perplexity": 10.0,
        "student/perplexity": perplexity,
        "student/perplexity_over_teacher": perplexity / 10,
        "student/made_by": "0123",
        "align/reused": False,
        **{f"{stage}/seconds": 1.5 for stage in ("data", "student", "evaluate", "total")},
    }
    write(path / "metrics.json", metrics)
    rows = [
        "model,measure,task,metric,value,stderr,samples,context,position",
        f"student,perplexity,held_out,perplexity,{perplexity},1.0,100,512,",
        f"student,corpus,wikitext2,perplexity,{perplexity + 1},1.0,100,2048,",
        "student,positions,held_out,nll,3.5,0.1,100,512,0",
        "student,positions,held_out,nll,3.0,0.1,100,512,64",
    ]
    write(path / "results.csv", "\n".join(rows) + "\n")
    weights = {"model.safetensors": {"sha256": "f" * 64, "bytes": 1}}
    write(path / "artifacts.json", {"student": {"key": "beef", "files": weights}})
    return path


def write_sweep(folder: Path, jobs: list[tuple[Path, list[str]]], launcher: str = "basic") -> None:
    record = {
        "version": 1,
        "created": "2026-11-30T12:00:00+00:00",
        "launcher": launcher,
        "command": ["python", "run.py", "-m", "init=full,phase1"],
        "jobs": [
            {"number": i, "overrides": overrides, "run_dir": str(path), "name": path.name}
            for i, (path, overrides) in enumerate(jobs)
        ],
    }
    write(folder / "sweep.json", record)
