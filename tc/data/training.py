"""The training text of recovery: packed to disk, read at random, shared by the devices.

Letters: N sequences, T tokens of a sequence, B sequences of a step over all devices, W devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from tc.artifacts import StreamedTensors
from tc.config import RecoveryStageConfig
from tc.data.documents import Document
from tc.data.packing import pieces_of, rows_of, stacked
from tc.data.tokens import prefix_ids, shuffled
from tc.errors import TCError, one_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Wanted = Mapping[str, tuple[int, int]]
"""(N, T) by the name of a stage, in order."""

TOKENS_AT_ONCE = 1 << 16
"""So many packed tokens are gathered before they are written."""


def steps_of(stage: RecoveryStageConfig) -> int:
    """The optimizer steps of a stage: the fewest that see all of its tokens."""
    return -(-stage.tokens // (stage.batch_sequences * stage.sequence_length))


def sequences_wanted(stage: RecoveryStageConfig) -> int:
    """N, the sequences that the steps of a stage see over all devices, each of them once."""
    return steps_of(stage) * stage.batch_sequences


def write_training(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    documents: list[Document],
    wanted: Wanted,
    seed: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> dict[str, int]:
    """Packs documents, one after another in a seeded order, and writes them stage by stage.

    Pieces and sequences are made as `pack` makes them, but documents do not take turns: each is
    tokenised when the one before it is used up, so that memory holds the tokens of one document
    and a few sequences. A stage begins with the document after the last one of the stage before
    it; what that one has left is not used. So no token of the text is used twice.

    Writes `<stage>.safetensors` for each stage, with `input_ids` and `position_ids` (0 at the
    first token of each piece), both int32 [N, T].

    Args:
        folder: an existing folder to write into.
        tokenizer: of the teacher.
        documents: the texts of the training part, each of them once.
        wanted: (N, T) by the name of the stage, in order, at least one: `stage1`, `stage2`.
        seed: chooses the order of documents, and of the pieces of each.
        progress: told how many tokens each step has done.

    Returns:
        The number of tokens of each stage, as `<stage>_tokens`.

    Raises:
        TCError: if T is too short, or the text ends before every stage has its sequences. That is
            known before anything is tokenised only where there are fewer bytes than tokens.
    """
    prefix = prefix_ids(tokenizer)
    _check_lengths(wanted, len(prefix))
    order = shuffled(documents, seed, "training")
    _check_bytes(order, wanted, len(prefix))
    given = 0
    rest = iter(order)
    for stage, (num_sequences, length) in wanted.items():
        # No more rows are asked for than needed, so `rest` then stands at the next document.
        pieces = (pieces_of(document, tokenizer, prefix, length, seed) for document in rest)
        rows = islice(rows_of(chain.from_iterable(pieces), length), num_sequences)
        path = folder / f"{stage}.safetensors"
        made = _write(path, rows, (num_sequences, length), progress)
        given += made * length
        if made < num_sequences:
            raise _too_little(f"give {given} tokens", wanted)
    return {f"{stage}_tokens": n * length for stage, (n, length) in wanted.items()}


def _check_lengths(wanted: Wanted, num_prefix: int) -> None:
    """Refuses sequences that have no room for text.

    Raises:
        TCError: naming every key to change.
    """
    problems = [
        f"recovery.{stage}.sequence_length={length} is too short; at least {num_prefix + 2} "
        f"(two tokens of text and {num_prefix} that the tokenizer puts before it)"
        for stage, (_, length) in wanted.items()
        if length < num_prefix + 2
    ]
    if problems:
        raise one_message(problems, "the training text cannot be packed as configured:")


def _check_bytes(documents: list[Document], wanted: Wanted, num_prefix: int) -> None:
    """Refuses a budget that the text cannot fill, for a token has at least one byte.

    Raises:
        TCError: with the most tokens that there can be, and how many are needed.
    """
    room = min(length for _, length in wanted.values()) - num_prefix
    # Some tokenizers put a space before a text, which is a token more.
    sizes = [len(document.text.encode()) + 1 for document in documents]
    most = sum(size + num_prefix * -(-size // room) for size in sizes)
    if most < _num_tokens(wanted):
        raise _too_little(f"have {sum(sizes) - len(sizes)} bytes, at most {most} tokens", wanted)


def _num_tokens(wanted: Wanted) -> int:
    return sum(num_sequences * length for num_sequences, length in wanted.values())


def _too_little(facts: str, wanted: Wanted) -> TCError:
    """What to say where the text ends before the budget."""
    budgets = ", ".join(f"{stage} {n * length}" for stage, (n, length) in wanted.items())
    keys = " or ".join(f"recovery.{stage}.tokens=..." for stage in wanted)
    return TCError(
        f"too little text: the training documents {facts}, and {_num_tokens(wanted)} are needed "
        f"({budgets}). Lower {keys}, raise data.shares.training, or give more text: data.path=[...]"
    )


def _write(
    path: Path,
    rows: Iterator[list[Tensor]],
    shape: tuple[int, int],
    progress: Callable[[int], None],
) -> int:
    """Writes rows as they come, and says how many came."""
    layout = dict.fromkeys(("input_ids", "position_ids"), (torch.int32, shape))
    at_once = max(1, TOKENS_AT_ONCE // shape[1])
    made = 0
    with closing(StreamedTensors(path, layout)) as file:
        while group := list(islice(rows, at_once)):
            packed = stacked(group)
            file.append("input_ids", packed.input_ids.int())
            file.append("position_ids", packed.position_ids.int())
            made += len(group)
            progress(packed.num_tokens)
    return made


class TrainingTokens(Dataset[tuple[Tensor, Tensor]]):
    """The sequences of a file that `write_training` wrote, read from disk one by one.

    Item n is `input_ids` Long [T] and `position_ids` Long [T]. The file is mapped into memory, so
    it may be larger than memory; a process that is given a pickled copy opens it anew.

    Args:
        path: `<stage>.safetensors`.

    Raises:
        TCError: if the file is missing, truncated or not safetensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            # As numpy, for there the mapping is read-only; that of torch may be written to, and so
            # the system refuses one that is larger than memory.
            file = safe_open(self.path, framework="numpy")
            self._tensors: list[Any] = [file.get_slice(n) for n in ("input_ids", "position_ids")]
        except (OSError, SafetensorError) as error:
            raise TCError(
                f"{path} cannot be read as training tokens ({error}); delete it and run again."
            ) from error
        self._num_sequences: int = self._tensors[0].get_shape()[0]

    def __reduce__(self) -> tuple[type[TrainingTokens], tuple[Path]]:
        return TrainingTokens, (self.path,)

    def __len__(self) -> int:
        return self._num_sequences

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        input_ids, position_ids = (
            torch.from_numpy(tensor[index].astype(np.int64)) for tensor in self._tensors
        )
        return input_ids, position_ids


class RankedSequences(Sampler[int]):
    """The sequences that one device sees, in the order of training; no sequence comes twice.

    One permutation of all N sequences is cut to steps of B, and a step to W equal stretches, of
    which device `rank` gets its own. So what a step sees does not depend on W, nor on the size of
    the batches that a data loader cuts from this order; that size should divide B / W, for a
    loader's batches know nothing of steps.

    Args:
        num_sequences: N; what is over a multiple of B is not used.
        batch_sequences: B.
        rank: from 0 to W - 1.
        world_size: W, which divides B.
        seed: chooses the permutation.
        start_step: steps that were done before; what they saw is left out.

    Raises:
        TCError: if B is not a multiple of W.
    """

    def __init__(
        self,
        num_sequences: int,
        batch_sequences: int,
        rank: int,
        world_size: int,
        seed: int,
        start_step: int = 0,
    ) -> None:
        if batch_sequences % world_size:
            raise TCError(
                f"a step of batch_sequences={batch_sequences} cannot be shared by {world_size} "
                "devices; take a multiple of trainer.devices times trainer.nodes"
            )
        self.num_steps = num_sequences // batch_sequences
        assert 0 <= rank < world_size and 0 <= start_step <= self.num_steps
        self.num_sequences = num_sequences
        self.batch_sequences = batch_sequences
        self.rank = rank
        self.share = batch_sequences // world_size
        self.seed = seed
        self.start_step = start_step

    def __len__(self) -> int:
        return (self.num_steps - self.start_step) * self.share

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(self.num_sequences, generator=generator)
        first = self.rank * self.share
        for step in range(self.start_step, self.num_steps):
            start = step * self.batch_sequences + first
            yield from order[start : start + self.share].tolist()
