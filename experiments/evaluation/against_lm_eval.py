"""Scores of `eval=offline`, set beside those of lm-eval's own model class on the same questions.

python experiments/evaluation/against_lm_eval.py OUT/RUN
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from omegaconf import OmegaConf

from tc.evaluate.harness import TASKS_FOLDER
from tc.evaluate.offline import LOCAL, task_file
from tc.evaluate.results import read_results

HERE = Path(__file__).parent


def directly(model: Path, tasks: list[str], limit: int) -> dict[str, dict[str, float]]:
    """What lm-eval makes of a saved model by itself, one question at a time.

    Args:
        model: a Hugging Face folder.
        tasks: offline tasks.
        limit: questions of each.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in tasks:
            (Path(folder) / f"{name}.yaml").write_text(task_file(name, TASKS_FOLDER))
        manager = TaskManager(include_path=[folder], include_defaults=False)
        theirs = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=1)
        found = simple_evaluate(theirs, tasks=tasks, task_manager=manager, limit=limit)
    return found["results"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run folder whose results have eval=offline")
    parser.add_argument("--teacher", type=Path, required=True, help="the teacher's folder")
    parser.add_argument("--tasks", nargs="+", default=list(LOCAL), choices=list(LOCAL))
    parser.add_argument("--result", type=Path, default=HERE)
    args = parser.parse_args()
    limit = OmegaConf.load(args.run / "config.yaml").eval.tasks.limit
    ours = {
        (row.task, row.metric): row
        for row in read_results(args.run / "results.csv").get("teacher", [])
        if row.measure == "tasks"
    }
    if not ours:
        sys.exit(f"{args.run} has no scores of its teacher: run it with eval=offline first")
    lines = ["| task | metric | ours | lm-eval | apart, in standard errors |", "|---" * 5 + "|"]
    rows = []
    for task, found in directly(args.teacher, args.tasks, limit).items():
        for metric in ("acc", "acc_norm"):
            row, value = ours.get((task, metric)), found.get(f"{metric},none")
            if row is None or value is None:
                continue
            apart = abs(row.value - value) / row.stderr if row.stderr else 0.0
            rows.append({"task": task, "metric": metric, "ours": row.value, "lm_eval": value})
            lines.append(f"| {task} | {metric} | {row.value:.3f} | {value:.3f} | {apart:.2f} |")
    args.result.mkdir(parents=True, exist_ok=True)
    (args.result / "against_lm_eval.md").write_text("\n".join(lines) + "\n")
    (args.result / "against_lm_eval.json").write_text(json.dumps(rows, indent=2) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
