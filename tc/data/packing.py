"""Documents cut to pieces and packed to sequences of one length.

Letters: N sequences, T tokens of a sequence.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tc.data.documents import Document
from tc.data.tokens import encode, prefix_ids, shuffled, take_turns
from tc.errors import TCError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Packed:
    """Token sequences of one length.

    Attributes:
        input_ids: Long [N, T].
        position_ids: Long [N, T], 0 at the first token of each piece: so a model sees boundaries.
    """

    input_ids: Tensor
    position_ids: Tensor

    @property
    def num_tokens(self) -> int:
        """N * T."""
        return self.input_ids.numel()


def pack(
    documents: list[Document],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    num_tokens: int,
    seed: int,
    part: str = "calibration",
) -> Packed:
    """Packs random pieces of documents, taking turns, to `num_tokens // sequence_length` sequences.

    A document is cut from its start to pieces of `sequence_length` tokens, each with the
    tokenizer's own first token (BOS) where it has one, and a last short piece. Whole pieces are
    sequences; short ones are put one behind another, and the one that overflows is cut.
    Documents are tokenised only when their turn comes.

    Args:
        documents: texts of one part.
        tokenizer: of the teacher.
        sequence_length: T, in tokens.
        num_tokens: the budget in tokens; what is over a multiple of T is not used.
        seed: chooses the order of documents and the pieces.
        part: whose budget it is, for messages: `data.<part>_tokens`.

    Raises:
        TCError: if the budget is smaller than one sequence or larger than the text, or T too short.
    """
    prefix = prefix_ids(tokenizer)
    _check_sizes(sequence_length, num_tokens, len(prefix), part)
    order = shuffled(documents, seed, part)
    pieces = take_turns(pieces_of(d, tokenizer, prefix, sequence_length, seed) for d in order)
    wanted = num_tokens // sequence_length
    rows = list(islice(rows_of(pieces, sequence_length), wanted))
    if len(rows) < wanted:
        raise TCError(_too_little(len(rows), wanted, sequence_length, part))
    return stacked(rows)


def _check_sizes(sequence_length: int, num_tokens: int, num_prefix: int, part: str) -> None:
    """Refuses sizes that no text could fill.

    Raises:
        TCError: naming the key to change.
    """
    if sequence_length < num_prefix + 2:
        raise TCError(
            f"data.sequence_length={sequence_length} is too short; at least {num_prefix + 2} "
            f"(two tokens of text and {num_prefix} that the tokenizer puts before it)"
        )
    if num_tokens < sequence_length:
        raise TCError(
            f"data.{part}_tokens={num_tokens} gives a {part} set smaller than one sequence of "
            f"data.sequence_length={sequence_length} tokens; raise the one or lower the other"
        )


def _too_little(made: int, wanted: int, sequence_length: int, part: str) -> str:
    """What to say where the text ends before the budget."""
    return (
        f"too little text: the {part} documents fill {made} sequences, {made * sequence_length} "
        f"tokens, and {wanted * sequence_length} are needed. Lower data.{part}_tokens=... "
        f"(or data.sequence_length), raise data.shares.{part}, or give more text: data.path=[...]"
    )


def pieces_of(
    document: Document,
    tokenizer: PreTrainedTokenizerBase,
    prefix: Tensor,
    sequence_length: int,
    seed: int,
) -> Iterator[Tensor]:
    """The pieces of one document in a seeded order, each Long [<= T]; tokenised on first demand."""
    bodies = encode(tokenizer, document.text).split(sequence_length - len(prefix))
    bodies = [body for body in bodies if len(body)]
    # A generator of its own, so that what a document gives does not hang on the others.
    random.Random(f"pieces {seed} {document.sha256}").shuffle(bodies)
    for body in bodies:
        yield torch.cat([prefix, body])


def rows_of(pieces: Iterable[Tensor], sequence_length: int) -> Iterator[list[Tensor]]:
    """Gathers pieces to rows of exactly `sequence_length` tokens; an unfilled last row is lost."""
    row: list[Tensor] = []
    room = sequence_length
    for piece in pieces:
        if len(piece) == sequence_length:
            yield [piece]
            continue
        row.append(piece[:room])
        room -= len(row[-1])
        if room == 0:
            yield row
            row, room = [], sequence_length


def stacked(rows: list[list[Tensor]]) -> Packed:
    """Rows of pieces, at least one row, as the sequences they are."""
    return Packed(
        input_ids=torch.stack([torch.cat(row) for row in rows]),
        position_ids=torch.stack([_positions(row) for row in rows]),
    )


def _positions(row: list[Tensor]) -> Tensor:
    return torch.cat([torch.arange(len(piece)) for piece in row])
