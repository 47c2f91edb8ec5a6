"""Perplexity on a whole text in windows without overlap, as papers count WikiText-2.

The rows of the text are joined by empty lines and tokenised at once, special tokens included, and
cut to windows of `context` tokens. In each window all tokens count but the first, which nothing
predicts. What is left behind the last whole window does not count.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tc.config import CorpusConfig
from tc.data import Window, read_file
from tc.errors import TCError
from tc.evaluate.perplexity import perplexity
from tc.evaluate.results import Result, adding_up, warn_beyond
from tc.network import offline_if_unreachable

SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")


def run_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cfg: CorpusConfig,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Result]:
    """Measures a model on a text.

    Args:
        model: a causal LM in evaluation mode.
        tokenizer: its tokenizer.
        cfg: which text, and how it is cut.
        seed: not used: nothing is drawn.
        progress: told how many tokens have been counted, and how many will be.

    Returns:
        `perplexity` and `nll` of a token; and `word_perplexity`, `byte_perplexity` and
        `bits_per_byte`, which models with other tokenizers share: the same loss, at the text's own
        number of tokens a word and a byte.

    Raises:
        TCError: if the text cannot be had or is shorter than one window, or a loss is not finite.
    """
    text = read_corpus(cfg)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    windows = cut(ids[: cfg.tokens], cfg)
    warn_beyond(model, "corpus", cfg.context)
    advance = adding_up(progress, len(windows) * (cfg.context - 1))
    found = perplexity(model, windows, cfg.batch_sequences, advance)
    per_word = len(ids) / len(text.split())
    per_byte = len(ids) / len(text.encode())
    shared = {
        "word_perplexity": _exp(found.nll * per_word),
        "byte_perplexity": _exp(found.nll * per_byte),
        "bits_per_byte": found.nll * per_byte / math.log(2),
    }
    name, place = label(cfg), {"samples": found.tokens, "context": cfg.context}
    return found.results("corpus", name, cfg.context) + [
        Result("corpus", name, metric, value, **place) for metric, value in shared.items()
    ]


def _exp(value: float) -> float:
    """The exponential, infinite where a float cannot hold it."""
    return math.exp(value) if value < 700 else math.inf


def label(cfg: CorpusConfig) -> str:
    """A short name of the text."""
    if is_file(cfg):
        return Path(cfg.path).stem
    return cfg.subset or cfg.path.rpartition("/")[2]


def is_file(cfg: CorpusConfig) -> bool:
    """Whether the path is a file's; a dataset on the hub is called `owner/name`."""
    return Path(cfg.path).suffix.lower() in (*SUFFIXES, ".gz") or Path(cfg.path).is_absolute()


def cut(ids: torch.Tensor, cfg: CorpusConfig) -> list[Window]:
    """The whole windows of a text's tokens, Long [T] each.

    Raises:
        TCError: if there is none.
    """
    number = len(ids) // cfg.context
    if number == 0:
        raise TCError(
            f"eval.corpus has {len(ids)} tokens, less than one window of "
            f"eval.corpus.context={cfg.context}; lower that, or take more text"
        )
    counted = torch.arange(cfg.context) > 0
    return [Window(row, counted) for row in ids[: number * cfg.context].view(number, -1)]


def read_corpus(cfg: CorpusConfig) -> str:
    """The whole text, its rows joined by empty lines.

    Raises:
        TCError: if it cannot be had.
    """
    if is_file(cfg):
        path = Path(cfg.path).expanduser()
        facts = path.stat() if path.exists() else None  # a file that has changed is another one
        version = (facts.st_mtime_ns, facts.st_size) if facts else None
        text = _of_file(path, cfg.text_column, version)
    else:
        text = _of_hub(cfg.path, cfg.subset, cfg.split, cfg.revision, cfg.text_column)
    if not text.strip():
        raise TCError(f"eval.corpus.path={cfg.path} has no text in it")
    return text


# It is read before a run begins, and for each model again: once is enough.
@functools.lru_cache(maxsize=1)
def _of_file(path: Path, text_column: str, version: object) -> str:
    return "\n\n".join(document.text for document in read_file(path, text_column))


@functools.lru_cache(maxsize=1)
def _of_hub(
    path: str, subset: str | None, split: str, revision: str | None, text_column: str
) -> str:
    # The import takes a second that other measures need not spend.
    import datasets

    try:
        with offline_if_unreachable():
            rows = datasets.load_dataset(path, subset, split=split, revision=revision)
        return "\n\n".join(rows[text_column])
    # Network, hub, file formats and the builder each raise their own kinds.
    except Exception as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise TCError(
            f"the text {path} (subset {subset}, split {split}, revision "
            f"{revision}) cannot be read: {first}\n"
            "It is on the model hub, which needs a network once. Without one, bring a file of it "
            "and give eval.corpus.path=/folder/test.parquet (or .txt, .jsonl); of WikiText-2 that "
            "is wikitext-2-raw-v1/test-00000-of-00001.parquet of Salesforce/wikitext."
        ) from error
