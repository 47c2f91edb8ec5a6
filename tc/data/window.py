"""Windows over documents for perplexity: every target counts once.

Letters: B windows, T tokens of a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tc.data.documents import Document
from tc.data.tokens import encode, prefix_ids, shuffled, take_turns
from tc.errors import TCError, one_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Window:
    """A stretch of one document.

    Attributes:
        input_ids: Long [T].
        counted: Bool [T], whether token t is a target that counts; its prediction is the model's
            output at t - 1, so `counted[0]` is False.
    """

    input_ids: Tensor
    counted: Tensor


def windows(
    documents: list[Document],
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    context: int,
    stride: int,
    seed: int,
) -> list[Window]:
    """Cuts windows that count exactly `tokens` targets, documents taking turns in a seeded order.

    Within a document windows start every `stride` tokens of text, but two windows share at least
    one token: without it nothing would predict the first token of a window, and it would never be
    counted. (So with `stride == context` and no BOS they start every `context - 1`.) The first
    window counts all its targets, a later one those that are not counted yet. Where the tokenizer
    starts a text with a special token (BOS), every window starts with it; it takes one place of
    the context and is never counted.

    Args:
        documents: texts of the evaluation part; tokenised only when their turn comes.
        tokenizer: of the teacher.
        tokens: counted targets in all; the last window counts only as many as are left.
        context: the most tokens of a window.
        stride: from 1 to `context`.
        seed: chooses the order of documents.

    Raises:
        TCError: if a size is not allowed, or if the text has fewer targets.
    """
    prefix = prefix_ids(tokenizer)
    _check_sizes(tokens, context, stride, len(prefix))
    order = shuffled(documents, seed, "evaluation")
    sources = (_of_document(d, tokenizer, prefix, context, stride) for d in order)
    result = list(_up_to(tokens, take_turns(sources)))
    given = sum(int(window.counted.sum()) for window in result)
    if given < tokens:
        raise TCError(
            f"too little text: the {len(order)} evaluation documents have {given} predicted "
            f"tokens, and eval.tokens={tokens} are needed. Lower eval.tokens, raise "
            "data.shares.evaluation, or give more text: data.path=[...]"
        )
    return result


def nested_windows(
    documents: list[Document],
    tokenizer: PreTrainedTokenizerBase,
    number: int,
    contexts: list[int],
    seed: int,
) -> list[dict[int, list[Window]]]:
    """Stretches of text, each cut to windows of every context: all contexts count the same targets.

    A stretch fills one window of the longest context and is of one document; documents take turns
    in a seeded order. What is left at a document's end is no whole stretch and is not used.

    Args:
        documents: texts of the evaluation part; tokenised only when their turn comes.
        tokenizer: of the teacher.
        number: of stretches.
        contexts: the most tokens of a window, for each cut.
        seed: chooses the order of documents.

    Returns:
        For each stretch its windows by context, which count all targets that have a token before
        them; the longest context has one window.

    Raises:
        TCError: if the documents have fewer whole stretches.
    """
    prefix = prefix_ids(tokenizer)
    room = max(contexts) - len(prefix)
    order = shuffled(documents, seed, "evaluation")
    stretches = take_turns(_whole(d, tokenizer, room) for d in order)
    found = list(islice(stretches, number))
    if len(found) < number:
        raise TCError(
            f"too little text: the {len(order)} evaluation documents have {len(found)} stretches "
            f"of {max(contexts)} tokens, and {number} are needed. Lower eval.positions.tokens or "
            "eval.positions.contexts, raise data.shares.evaluation, or give longer documents: "
            "data.path=[...]"
        )
    return [{c: list(_cut(ids, prefix, c, c)) for c in contexts} for ids in found]


def _whole(document: Document, tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[Tensor]:
    """The whole stretches of one document, Long [length]; tokenised on first demand."""
    ids = encode(tokenizer, document.text)
    yield from ids[: len(ids) // length * length].view(-1, length)


def _check_sizes(tokens: int, context: int, stride: int, num_prefix: int) -> None:
    """Refuses sizes that give no windows, or that would leave targets out.

    Raises:
        TCError: with every size that is wrong.
    """
    least = num_prefix + 2
    problems = []
    if tokens < 1:
        problems.append(f"eval.tokens is {tokens}; at least 1")
    if context < least:
        problems.append(f"eval.context is {context}; at least {least}")
    if not 1 <= stride <= context:
        problems.append(f"eval.stride is {stride}; 1 to eval.context={context}")
    if problems:
        raise one_message(problems, "perplexity cannot be measured as configured:")


def _of_document(
    document: Document,
    tokenizer: PreTrainedTokenizerBase,
    prefix: Tensor,
    context: int,
    stride: int,
) -> Iterator[Window]:
    """The windows of one document from its start; tokenised on first demand."""
    yield from _cut(encode(tokenizer, document.text), prefix, context, stride)


def _cut(ids: Tensor, prefix: Tensor, context: int, stride: int) -> Iterator[Window]:
    """The windows of one text, which count every target once."""
    room = context - len(prefix)
    step = min(stride, room - 1)
    # Without a BOS nothing predicts the text's first token.
    done = 0 if len(prefix) else 1
    start = 0
    while done < len(ids):
        end = min(start + room, len(ids))
        counted = torch.zeros(len(prefix) + end - start, dtype=torch.bool)
        counted[len(prefix) + done - start :] = True
        yield Window(torch.cat([prefix, ids[start:end]]), counted)
        done = end
        start += step


def _up_to(tokens: int, source: Iterator[Window]) -> Iterator[Window]:
    """Windows until `tokens` targets are counted; the last one's later targets do not count."""
    left = tokens
    for window in source:
        counted = window.counted & (window.counted.cumsum(0) <= left)
        yield Window(window.input_ids, counted)
        left -= int(counted.sum())
        if left == 0:
            return


def collate(batch: list[Window], pad_id: int) -> dict[str, Tensor]:
    """Pads windows on the right to one batch.

    Args:
        batch: B windows, at least one.
        pad_id: the id that fills `input_ids`; any valid one, for it is masked.

    Returns:
        `input_ids` Long [B, T], `attention_mask` Long [B, T] (1 on tokens), `counted` Bool [B, T].
    """
    ids = [window.input_ids for window in batch]
    masks = [torch.ones_like(row) for row in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_id),
        "attention_mask": pad_sequence(masks, batch_first=True),
        "counted": pad_sequence([window.counted for window in batch], batch_first=True),
    }
