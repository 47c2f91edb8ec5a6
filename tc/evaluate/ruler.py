"""RULER: what a model finds in long prompts, of which none is ever cut.

lm-eval makes prompts that leave no room for the beginning of the answer, which it puts behind them,
and then lets the start of a prompt go. Here the room is measured: prompts are counted as the model
will see them, and made anew, with as much less in them as the longest was too long.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tc.config import RulerConfig
from tc.errors import TCError, one_message
from tc.evaluate.results import Result, warn_beyond
from tc.evaluate.tasks import require

log = logging.getLogger(__name__)

PACKAGES = ("lm_eval", "accelerate", "wonderwords", "nltk", "scipy")

MADE = (
    *("niah_single_1", "niah_multikey_2", "niah_multikey_3"),
    *("ruler_vt", "ruler_cwe", "ruler_fwe"),
)
"""The tasks that need nothing from elsewhere."""

ESSAY = (
    *("niah_single_2", "niah_single_3", "niah_multikey_1"),
    *("niah_multivalue", "niah_multiquery"),
)
"""The tasks that hide their needles in essays."""

SQUAD, HOTPOT = "ruler_qa_squad", "ruler_qa_hotpot"

TASKS = (*MADE, *ESSAY, SQUAD, HOTPOT)
"""RULER's thirteen."""

TRIES = 6
"""How often prompts are made before a length is given up."""


def left_out(cfg: RulerConfig) -> dict[str, str]:
    """The tasks that cannot run, and what each of them lacks."""
    lacking = {HOTPOT: "HotpotQA, which lm-eval downloads"}
    if not cfg.essay:
        lacking.update(dict.fromkeys(ESSAY, "eval.ruler.essay, a long text file"))
    if not cfg.squad:
        lacking[SQUAD] = "eval.ruler.squad, SQuAD's dev-v2.0.json"
    return lacking


def run_ruler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cfg: RulerConfig,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Result]:
    """Scores a model on RULER; a task that lacks its file is left out, and the log says so.

    Args:
        model: a causal LM in evaluation mode.
        tokenizer: its tokenizer.
        cfg: which tasks, how long and how many.
        seed: of the prompts: the same for every model with this tokenizer.
        progress: told how many prompts have been answered, and how many there are.

    Returns:
        The share of each prompt's answers that the model gave, by task and length.

    Raises:
        TCError: if a package or file is missing, or a task does not fit in a length.
    """
    require(*PACKAGES)
    for length in cfg.lengths:
        warn_beyond(model, "RULER", length)
    prompts = _prompts(model, tokenizer, cfg, seed)
    total = len(prompts) * cfg.limit
    results: list[Result] = []
    for (length, task), (scorer, loaded) in prompts.items():
        before = len(results) * cfg.limit

        def told(done: int, of_task: int, before: int = before) -> None:
            progress(before + done, total)

        scorer.restart(told)
        results.append(_run(scorer, task, loaded, length, seed))
    return results


def _tasks(cfg: RulerConfig) -> list[str]:
    """The tasks that run."""
    lacking = left_out(cfg)
    if cfg.tasks is None:
        for task, what in lacking.items():
            log.info("RULER: %s is left out, for want of %s", task, what)
        return [task for task in TASKS if task not in lacking]
    problems = [f"{t} needs {lacking[t]}" for t in cfg.tasks if t in lacking]
    if problems:
        raise one_message(problems, "RULER cannot be run:")
    return cfg.tasks


def _prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cfg: RulerConfig, seed: int
) -> dict[tuple[int, str], tuple[Any, Any]]:
    """Makes the prompts of every length and task, before any of them is answered.

    Returns:
        A scorer and lm-eval's task, by length and name.

    Raises:
        TCError: naming all that cannot be made.
    """
    from tc.evaluate import harness

    tasks = _tasks(cfg)
    made: dict[tuple[int, str], tuple[Any, Any]] = {}
    problems: dict[str, None] = {}
    with harness.quiet(), _silent():
        for length in cfg.lengths:
            scorer = harness.Scorer(model, tokenizer, cfg.batch_size, max_length=length)
            for task in tasks:
                try:
                    loaded = fitting(scorer, tokenizer, task, length, cfg, seed)
                    made[length, task] = scorer, loaded
                except TCError as error:
                    problems[str(error)] = None
    if problems:
        raise one_message(list(problems), "RULER cannot be run:")
    return made


def _run(scorer: Any, task: str, loaded: Any, length: int, seed: int) -> Result:
    """One task at one length."""
    from tc.evaluate import harness

    with harness.seeded(seed):
        found = harness.scores(scorer, {"tasks": {task: loaded}}, None, samples=True)
    values = [sample[str(length)] for sample in found["samples"][task]]
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Result(
        measure="ruler",
        task=task,
        metric="string_match",
        value=statistics.fmean(values),
        stderr=spread,
        samples=len(values),
        context=length,
    )


def fitting(
    scorer: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    length: int,
    cfg: RulerConfig,
    seed: int,
) -> Any:
    """lm-eval's task with documents whose prompts leave room for the answer.

    Args:
        scorer: counts the tokens of a prompt as it will give them to the model.
        tokenizer: of the model.
        task: its name.
        length: tokens of prompt and answer, at most.
        cfg: how many, and the files.
        seed: of the documents.

    Raises:
        TCError: if there are none.
    """
    from tc.evaluate.harness import seeded
    from tc.evaluate.ruler_prompts import Order, make

    spare = 0
    for _ in range(TRIES):
        order = Order(tokenizer, length, spare, cfg.limit, cfg.essay, cfg.squad)
        with seeded(seed):
            loaded = _loaded(task, make(task, order))
            loaded.build_all_requests()
        answer = loaded.get_config("generation_kwargs")["max_gen_toks"]
        longest = max(_tokens(scorer, request.args[0]) for request in loaded.instances)
        if longest + answer <= length:
            return loaded
        spare += longest + answer - length
    raise TCError(
        f"{task} at {length} tokens: after {TRIES} tries a prompt of {longest} tokens and an "
        f"answer of {answer} still do not fit; take longer eval.ruler.lengths"
    )


def _tokens(scorer: Any, prompt: str) -> int:
    return scorer.tok_batch_encode([prompt])[0].shape[1]


def _loaded(task: str, docs: list[dict[str, Any]]) -> Any:
    """lm-eval's task of this name with other documents."""
    from lm_eval.tasks import TaskManager

    from tc.evaluate.harness import TASKS_FOLDER

    file = TASKS_FOLDER / "ruler" / f"{task.removeprefix('ruler_')}.yaml"
    text = (
        f"include: {json.dumps(str(file))}\n"
        f"task: {task}\n"
        "custom_dataset: !function tc.evaluate.ruler.given\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task.yaml").write_text(text, encoding="utf-8")
        manager = TaskManager(
            include_path=folder, include_defaults=False, metadata={"documents": docs}
        )
        return manager.load([task])["tasks"][task]


def given(documents: list[dict[str, Any]], **metadata: Any) -> dict[str, Any]:
    """The data set of a task, as lm-eval's `custom_dataset` wants it.

    Args:
        documents: the test split.
        metadata: what lm-eval passes besides.
    """
    from datasets import Dataset

    return {"test": Dataset.from_list(documents)}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what lm-eval prints as it makes prompts."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
