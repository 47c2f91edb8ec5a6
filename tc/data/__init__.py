"""Text: read it, split it by document into disjoint parts, cut and pack it to tokens."""

from tc.data.documents import PARTS, Document
from tc.data.files import read_file
from tc.data.packing import Packed, pack
from tc.data.splits import (
    Splits,
    config_problems,
    load_splits,
    missing_sources,
    prove_disjoint,
    sources_digest,
)
from tc.data.store import evaluation_windows, packed_part, write_tokens
from tc.data.training import (
    RankedSequences,
    TrainingTokens,
    sequences_wanted,
    steps_of,
    write_training,
)
from tc.data.window import Window, collate, nested_windows, windows

__all__ = [
    "PARTS",
    "Document",
    "Packed",
    "RankedSequences",
    "Splits",
    "TrainingTokens",
    "Window",
    "collate",
    "config_problems",
    "evaluation_windows",
    "load_splits",
    "missing_sources",
    "nested_windows",
    "pack",
    "packed_part",
    "prove_disjoint",
    "read_file",
    "sequences_wanted",
    "sources_digest",
    "steps_of",
    "windows",
    "write_tokens",
    "write_training",
]
