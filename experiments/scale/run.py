"""What a 70B teacher on 64 GPUs needs, by the estimator of `dry_run`; nothing is loaded.

    python experiments/scale/run.py [--tflops 400] [--gbytes 50] [key=value ...]

Writes `result.json` and `table.md`. Arithmetic is at the given rate a GPU, traffic at the given
bytes a second that each GPU sends; tokens a second are a bound, since neither waits for the other.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import configuration

from tc.artifacts import write_json, write_text
from tc.check import validate
from tc.plan import BYTES, Plan, make_plan
from tc.teacher import read_geometry

HERE = Path(__file__).parent
GEOMETRY = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "parameters": 70_553_706_496,
}
"""Of Llama-3.1-70B."""

OVERRIDES = [
    # A Llama of the hub, but for its place and its sizes.
    *("teacher=llama3_2_3b", "teacher.path=meta-llama/Llama-3.1-70B"),
    *(f"teacher.geometry.{name}={value}" for name, value in GEOMETRY.items()),
    *("init=full", "policy=every4", "recovery=paper", "dry_run=true"),
    *("trainer=fsdp", "trainer.devices=8", "trainer.nodes=8", "trainer.accelerator=gpu"),
    # As the recipe has them, but shared evenly by 64.
    *("recovery.stage1.batch_sequences=128", "recovery.stage2.batch_sequences=64"),
]


def price(more: list[str]) -> tuple[Plan, dict[str, int]]:
    """The plan, and sizes of artifacts that it adds up."""
    given = [*OVERRIDES, *more]
    config = configuration(given)
    validate(config, given)
    plan = make_plan(config, read_geometry(config.teacher))
    geometry, data = plan.geometry, config.data
    width = geometry.num_attention_heads * geometry.head_dim
    tokens = data.calibration_tokens + data.selection_tokens
    size = BYTES[config.teacher.dtype.value]
    each = tokens * (geometry.hidden_size + width) * size
    trained = plan.recovery["stage2"].memory.trained * 64 // 16
    artifacts = {
        "inputs and contexts of a layer": each,
        "inputs and contexts of all layers": each * geometry.num_hidden_layers,
        "Gram matrices of a layer (float64, in memory, init=closed_form)": 8
        * width
        * (width + geometry.hidden_size),
        "a mixer (float32)": 4 * plan.mixer_parameters,
        "a checkpoint of stage 2 (weights, two moments)": 12 * trained,
        "the student": plan.student_parameters * size,
        "all of the run folder and its cache": plan.disk_bytes,
    }
    return plan, artifacts


def gigabytes(number: float) -> str:
    return f"{number / 1e9:,.1f} GB"


def table(plan: Plan, artifacts: dict[str, int], given: argparse.Namespace) -> str:
    """Markdown of all figures."""
    lines = ["| each GPU of 64, FSDP, bfloat16 | stage 1 | stage 2 |", "|---|---|---|"]
    costs = [plan.recovery["stage1"], plan.recovery["stage2"]]
    for part in asdict(costs[0].memory):
        values = [gigabytes(asdict(cost.memory)[part]) for cost in costs]
        lines.append(f"| {part} | {' | '.join(values)} |")
    rows: dict[str, list[str]] = {
        "**in shards, in all**": [gigabytes(c.memory.total) for c in costs],
        "**before models are dealt**": [gigabytes(c.loading_bytes) for c in costs],
        "arithmetic of a step": [f"{c.step_flops / 1e15:.1f} PFLOP" for c in costs],
        "traffic of a step, sent": [gigabytes(c.step_traffic_bytes) for c in costs],
        "tokens of a step": [f"{c.step_tokens:,}" for c in costs],
        f"bound by arithmetic, {given.tflops:g} TFLOP/s": [
            f"{c.tokens_per_second(given.tflops * 1e12, 1e30):,.0f} tokens/s" for c in costs
        ],
        f"bound by traffic, {given.gbytes:g} GB/s": [
            f"{c.tokens_per_second(1e30, given.gbytes * 1e9):,.0f} tokens/s" for c in costs
        ],
    }
    lines += [f"| {name} | {' | '.join(values)} |" for name, values in rows.items()]
    lines += ["", "| stages on one device | |", "|---|---|"]
    lines.append(f"| calibrate, initialise, align, evaluate | {gigabytes(plan.memory_bytes)} |")
    lines += ["", "| artifact | |", "|---|---|"]
    lines += [f"| {name} | {gigabytes(size)} |" for name, size in artifacts.items()]
    return "\n".join(lines) + "\n"


def measured_table(rows: list[dict[str, Any]]) -> str:
    """Estimates beside what was measured."""
    lines = [
        "| trained | processes | making both models: told | taken | at the peak: told | taken |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        values = ("told_loading", "taken_loading", "told_peak", "taken_peak")
        cells = [f"{row[name] / 1e6:,.0f} MB" for name in values]
        lines.append(f"| {row['trained']} | {row['processes']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prices, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tflops", type=float, default=400.0, help="that a GPU does in a second")
    parser.add_argument("--gbytes", type=float, default=50.0, help="that a GPU sends in a second")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for run.py")
    given = parser.parse_args()
    plan, artifacts = price(given.overrides)
    text = table(plan, artifacts, given)
    file = HERE / "measured.json"
    if file.is_file():
        text += "\nOn a CPU, resident memory of the process that took most:\n\n"
        text += measured_table(json.loads(file.read_text()))
    print(text)
    result = {
        "tflops": given.tflops,
        "gbytes": given.gbytes,
        "plan": {**asdict(plan), "seconds": None},
        "artifacts": artifacts,
    }
    write_json(HERE / "result.json", result)
    write_text(HERE / "table.md", text)


if __name__ == "__main__":
    main()
