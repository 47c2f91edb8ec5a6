"""A run's token ids on disk: packed parts, evaluation windows, and the record of the split.

Letters: N sequences or windows, T tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tc.artifacts import save_tensors, write_json
from tc.config import DataConfig, EvalConfig
from tc.data.packing import Packed, pack
from tc.data.splits import load_splits, prove_disjoint
from tc.data.window import Window, collate, windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKED_PARTS = ("calibration", "selection")


def write_tokens(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    evaluation: EvalConfig,
    seed: int,
) -> dict[str, int]:
    """Reads, splits, tokenises and packs the text of a run.

    Writes `tokens.safetensors` (for each packed part `<part>_ids` and `<part>_positions`, and
    `evaluation_ids`, `evaluation_mask`, `evaluation_counted`, each `[N, T]`) and `splits.json`,
    which names every document of every part by its hash.

    Returns:
        The number of tokens of each part; for `evaluation` those that count.

    Raises:
        TCError: if the text cannot be read, is too short, or a document stands in two parts.
    """
    splits = load_splits(data, seed)
    tensors: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for part in PACKED_PARTS:
        wanted = getattr(data, f"{part}_tokens")
        packed = pack(splits.parts[part], tokenizer, data.sequence_length, wanted, seed, part)
        tensors[f"{part}_ids"] = packed.input_ids
        tensors[f"{part}_positions"] = packed.position_ids
        counts[f"{part}_tokens"] = packed.num_tokens
    spec = (evaluation.tokens, evaluation.context, evaluation.stride)
    held_out = collate(windows(splits.parts["evaluation"], tokenizer, *spec, seed), pad_id=0)
    tensors["evaluation_ids"] = held_out["input_ids"]
    tensors["evaluation_mask"] = held_out["attention_mask"]
    tensors["evaluation_counted"] = held_out["counted"]
    counts["evaluation_tokens"] = int(held_out["counted"].sum())
    prove_disjoint(splits)
    save_tensors(folder / "tokens.safetensors", tensors)
    write_json(folder / "splits.json", splits.record())
    return counts


def packed_part(tensors: dict[str, Tensor], part: str) -> Packed:
    """A packed part as it was written."""
    return Packed(tensors[f"{part}_ids"], tensors[f"{part}_positions"])


def evaluation_windows(tensors: dict[str, Tensor]) -> list[Window]:
    """The evaluation windows as they were written, without their padding."""
    rows: Any = zip(
        tensors["evaluation_ids"],
        tensors["evaluation_mask"].bool(),
        tensors["evaluation_counted"].bool(),
        strict=True,
    )
    return [Window(ids[mask], counted[mask]) for ids, mask, counted in rows]
