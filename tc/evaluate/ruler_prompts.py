"""Documents of RULER's tasks, made by lm-eval's own functions with a tokenizer in memory.

lm-eval's tasks want a tokenizer by name and make 500 documents for each length; the functions below
them do not. Two of them never end where not even their shortest prompt fits, and catch every
exception on the way: `shortest` is asked first.

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

from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, qa_utils, vt_utils
from transformers import PreTrainedTokenizerBase

from tc.errors import TCError

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

VT_EXAMPLE_TOKENS = 500
"""What lm-eval allows for the solved example in a prompt of variable tracking."""

DRAW = 70
"""The letters of what variable tracking draws anew, so the most tokens that two draws differ by."""


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


def make(task: str, order: Order) -> list[Doc]:
    """Makes documents of a task.

    Raises:
        TCError: if they do not fit, or their source is too short.
    """
    least = shortest(task, order) + order.spare
    if least > order.length:
        raise TCError(too_short(task, order.length, least))
    try:
        docs = MAKERS[task](order) if task in MAKERS else _needles(task, order)
    except (ValueError, IndexError) as error:
        raise TCError(f"{task} at {order.length} tokens: {error}") from error
    if len(docs) < order.number or not all(doc["outputs"] for doc in docs):
        raise TCError(too_short(task, order.length, None))
    return [{**doc, "max_length": order.length} for doc in docs]


def too_short(task: str, length: int, least: int | None) -> str:
    """What to say of a length that not even the shortest prompts of a task fit in."""
    needed = "more" if least is None else f"about {least}"
    return (
        f"{task} does not fit in {length} tokens: with this tokenizer it needs {needed}. Take "
        "longer eval.ruler.lengths, or leave it out of eval.ruler.tasks"
    )


def shortest(task: str, order: Order) -> int:
    """Tokens of the shortest prompt and answer of a task, 0 where lm-eval looks at that itself.

    Raises:
        TCError: if variable tracking cannot make its solved example with this tokenizer.
    """
    if task == "ruler_vt":
        example = _vt_tokens(order, noises=5, is_icl=True)
        if example > VT_EXAMPLE_TOKENS:
            raise TCError(
                f"ruler_vt needs a solved example of at most {VT_EXAMPLE_TOKENS} tokens, and with "
                f"this tokenizer it takes {example}. Leave it out of eval.ruler.tasks"
            )
        return VT_EXAMPLE_TOKENS + _vt_tokens(order, noises=10, is_icl=False)
    if task == "ruler_cwe":
        example, text, words = cwe_utils.generate_input_output(10, order.length)
        return order.count(f"{example}\n{text} {words} ") + 120
    if task == "ruler_fwe":
        return order.count(fwe_utils.TEMPLATE) + DRAW + 50
    return 0


def _vt_tokens(order: Order, noises: int, is_icl: bool) -> int:
    """The most tokens of a prompt of variable tracking and its answer."""
    text, answer = vt_utils.generate_input_output(noises, 1, 4, is_icl)
    return order.count(f"{text} {answer}") + DRAW + 30


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
        tokens_to_generate=128 + order.spare,
        **kind,
    )


def _essay(order: Order) -> list[str]:
    """The words of the essay file, of which there must be enough to fill a prompt."""
    path = Path(str(order.essay)).expanduser()
    text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8")).strip()
    if (tokens := order.count(text)) < order.length:
        raise TCError(
            f"eval.ruler.essay={path} has {tokens} tokens, less than the length "
            f"{order.length}; give a longer text"
        )
    return text.split(" ")


def _variables(order: Order) -> list[Doc]:
    """As lm-eval's `vt_utils.get_dataset`."""
    track = vt_utils.sys_vartrack_w_noise_random
    example = track(order.tokenizer, 1, max_seq_length=VT_EXAMPLE_TOKENS, incremental=5)[0]
    return track(
        order.tokenizer,
        order.number,
        max_seq_length=order.length,
        tokens_to_generate=30 + order.spare,
        icl_example=example,
    )


def _common_words(order: Order) -> list[Doc]:
    # A generator of lm-eval's own, which every call leaves in another state.
    cwe_utils.RNG.seed(random.getrandbits(32))
    return cwe_utils.sys_word_pair_random(
        order.number,
        max_seq_length=order.length,
        tokenizer=order.tokenizer,
        tokens_to_generate=120 + order.spare,
    )


def _frequent_words(order: Order) -> list[Doc]:
    """lm-eval fills the whole length and leaves no room for the answer; here there is."""
    return fwe_utils.sys_kwext(
        order.tokenizer,
        max_seq_length=order.length - 50 - order.spare,
        num_samples=order.number,
        vocab_size=order.length // 50,
    )


def _questions(order: Order) -> list[Doc]:
    qas, docs = read_squad(Path(str(order.squad)).expanduser())
    return qa_utils.generate_samples(
        order.tokenizer,
        docs,
        qas,
        max_seq_length=order.length,
        num_samples=min(order.number, len(qas)),
        tokens_to_generate=32 + order.spare,
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
