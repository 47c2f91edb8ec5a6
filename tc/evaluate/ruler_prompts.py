"""Documents of RULER's tasks, made by lm-eval's own functions with a tokenizer in memory.

lm-eval's tasks want a tokenizer by name and make 500 documents for each length; the functions below
them do not. Three of them never end where not even their shortest prompt fits, and catch every
exception on the way: whether it does is looked at first.

Everything here needs lm-eval, whose import takes seconds: import this module where it is used.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import nltk
import numpy as np
from transformers import PreTrainedTokenizerBase

from tc.errors import TCError

# The import would fetch nltk's sentence splitter, which only essays need.
with mock.patch.object(nltk, "download"):
    from lm_eval.tasks.ruler import (
        cwe_utils,
        fwe_utils,
        niah_utils,
        prepare_niah,
        qa_utils,
        vt_utils,
    )

Doc = dict[str, Any]

WORDS = {"type_needle_k": "words", "type_needle_v": "numbers"}

NEEDLES: dict[str, dict[str, Any]] = {
    "niah_single_1": {"type_haystack": "repeat", **WORDS},
    "niah_single_2": {"type_haystack": "essay", **WORDS},
    "niah_single_3": {"type_haystack": "essay", **WORDS, "type_needle_v": "uuids"},
    "niah_multikey_1": {"type_haystack": "essay", **WORDS, "num_needle_k": 4},
    "niah_multikey_2": {"type_haystack": "needle", **WORDS},
    "niah_multikey_3": {
        "type_haystack": "needle",
        "type_needle_k": "uuids",
        "type_needle_v": "uuids",
    },
    "niah_multivalue": {"type_haystack": "essay", **WORDS, "num_needle_v": 4},
    "niah_multiquery": {"type_haystack": "essay", **WORDS, "num_needle_q": 4},
}
"""What lm-eval's functions of these names pass on."""

ANSWER_TOKENS = {"ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50, "ruler_qa_squad": 32}
"""Of the answer, for which lm-eval's functions leave room; 128 for the others."""

VT_EXAMPLE_TOKENS = 500
"""What lm-eval allows for the solved example in a prompt of variable tracking."""


@dataclass(frozen=True)
class Order:
    """What is wanted.

    Attributes:
        tokenizer: counts the tokens.
        length: tokens of prompt and answer, at most.
        spare: as many tokens fewer, for what lm-eval adds to a prompt.
        number: how many documents.
        essay, squad: the files that some tasks need.
    """

    tokenizer: PreTrainedTokenizerBase
    length: int
    spare: int
    number: int
    essay: str | None = None
    squad: str | None = None

    def count(self, text: str) -> int:
        """Its tokens."""
        return len(self.tokenizer(text).input_ids)

    def room(self, task: str) -> int:
        """Tokens that the prompt may have."""
        return self.length - self.spare - ANSWER_TOKENS.get(task, 128)


def make(task: str, order: Order) -> list[Doc]:
    """Makes documents of a task.

    Raises:
        TCError: if they do not fit, or their source is too short.
    """
    try:
        docs = MAKERS[task](order) if task in MAKERS else _needles(task, order)
    except (ValueError, IndexError) as error:
        raise TCError(f"{task} at {order.length} tokens: {error}") from error
    if len(docs) < order.number or not all(_answerable(doc) for doc in docs):
        raise too_short(task, order)
    return [{**doc, "max_length": order.length} for doc in docs]


def _answerable(doc: Doc) -> bool:
    """Whether a prompt holds what is asked for: too short a one may not."""
    return bool(doc["outputs"]) and all(answer in doc["input"] for answer in doc["outputs"])


def too_short(task: str, order: Order) -> TCError:
    """What to say of a length that not even the shortest prompts of a task fit in."""
    return TCError(
        f"{task} does not fit in {order.length} tokens with this tokenizer. Take longer "
        "eval.ruler.lengths, or leave it out of eval.ruler.tasks"
    )


def _needles(task: str, order: Order) -> list[Doc]:
    kind = NEEDLES[task]
    haystack: Any
    if kind["type_haystack"] == "essay":
        haystack = _essay(order)
    else:
        haystack = prepare_niah.get_haystack(kind["type_haystack"])
    return prepare_niah.generate_samples(
        haystack,
        order.tokenizer,
        max_seq_length=order.length,
        template=niah_utils.TEMPLATE,
        num_samples=order.number,
        tokens_to_generate=order.length - order.room(task),
        **kind,
    )


def _essay(order: Order) -> list[str]:
    """The words of the essay file, of which there must be enough to fill a prompt."""
    _require_sentences()
    path = Path(str(order.essay)).expanduser()
    text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8")).strip()
    if (tokens := order.count(text)) < order.length:
        raise TCError(
            f"eval.ruler.essay={path} has {tokens} tokens, less than the length "
            f"{order.length}; give a longer text"
        )
    return text.split(" ")


def _require_sentences() -> None:
    """Checks that lm-eval can part an essay into sentences, between which needles are put."""
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise TCError(
            "eval.ruler.essay needs nltk's sentence splitter. Run, where there is a network: "
            "python -m nltk.downloader punkt_tab"
        ) from None


def _variables(order: Order) -> list[Doc]:
    """As lm-eval's `vt_utils.get_dataset`, where it would end.

    It begins with its shortest prompt. If that does not fit, it tries ever the same, for ever.
    """
    track, room = vt_utils.sys_vartrack_w_noise_random, order.room("ruler_vt")
    # With a small vocabulary the shortest example takes more than lm-eval allows.
    allowed = max(VT_EXAMPLE_TOKENS, order.count(_first_draw(noises=5, is_icl=True)) + 30)
    example = track(order.tokenizer, 1, max_seq_length=allowed, incremental=5)[0]
    solved = order.count(f"{example['input']} {' '.join(example['outputs'])}\n\n")
    if solved + order.count(_first_draw(noises=10, is_icl=False)) > room:
        raise too_short("ruler_vt", order)
    return track(
        order.tokenizer,
        order.number,
        max_seq_length=order.length,
        tokens_to_generate=order.length - room,
        icl_example=example,
    )


def _first_draw(noises: int, is_icl: bool) -> str:
    """The prompt and answer that lm-eval will draw next; the generators stay as they are."""
    before = random.getstate(), np.random.get_state()
    text, answer = vt_utils.generate_input_output(noises, 1, 4, is_icl)
    random.setstate(before[0])
    np.random.set_state(before[1])
    return f"{text} {answer}"


def _common_words(order: Order) -> list[Doc]:
    room = order.room("ruler_cwe")
    if order.count(cwe_utils.TEMPLATE) > room:
        raise too_short("ruler_cwe", order)
    # A generator of lm-eval's own, which every call leaves in another state.
    cwe_utils.RNG.seed(random.getrandbits(32))
    return cwe_utils.sys_word_pair_random(
        order.number,
        max_seq_length=order.length,
        tokenizer=order.tokenizer,
        tokens_to_generate=order.length - room,
    )


def _frequent_words(order: Order) -> list[Doc]:
    """lm-eval fills the whole length and leaves no room for the answer; here there is."""
    room = order.room("ruler_fwe")
    if order.count(fwe_utils.TEMPLATE) > room:
        raise too_short("ruler_fwe", order)
    return fwe_utils.sys_kwext(
        order.tokenizer,
        max_seq_length=room,
        num_samples=order.number,
        vocab_size=order.length // 50,
    )


def _questions(order: Order) -> list[Doc]:
    path = Path(str(order.squad)).expanduser()
    qas, docs = read_squad(path)
    if len(qas) < order.number or order.count("\n\n".join(docs)) < order.length:
        raise TCError(
            f"eval.ruler.squad={path} has {len(qas)} questions and {len(docs)} passages, too few "
            f"for {order.number} prompts of {order.length} tokens; give SQuAD's whole dev-v2.0.json"
        )
    return qa_utils.generate_samples(
        order.tokenizer,
        # A list lm-eval would shuffle, and then look passages up in it by their old places.
        tuple(docs),
        qas,
        max_seq_length=order.length,
        num_samples=order.number,
        tokens_to_generate=order.length - order.room("ruler_qa_squad"),
    )


def read_squad(path: Path) -> tuple[list[Doc], list[str]]:
    """Questions and passages of SQuAD 2's file, as lm-eval's `read_squad` has them of its address.

    Raises:
        TCError: if the file is not SQuAD's.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        passages = [[p["context"] for p in article["paragraphs"]] for article in articles]
        docs = sorted({text for of_article in passages for text in of_article})
        place = {text: i for i, text in enumerate(docs)}
        qas = [
            {
                "query": qa["question"],
                "outputs": [answer["text"] for answer in qa["answers"]],
                "context": [place[paragraph["context"]]],
                "more_context": [place[t] for t in of_article if t != paragraph["context"]],
            }
            for article, of_article in zip(articles, passages, strict=True)
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
            if not qa["is_impossible"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise TCError(
            f"eval.ruler.squad={path} is not SQuAD's dev-v2.0.json ({error!r})"
        ) from error
    return qas, docs


MAKERS: dict[str, Callable[[Order], list[Doc]]] = {
    "ruler_vt": _variables,
    "ruler_cwe": _common_words,
    "ruler_fwe": _frequent_words,
    "ruler_qa_squad": _questions,
}
