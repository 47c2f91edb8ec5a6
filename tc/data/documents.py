"""A document, and the names of the parts that documents are dealt to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

PARTS = ("calibration", "training", "selection", "evaluation")
"""What text is used for, one part each: statistics and alignment, recovery, choosing, measuring."""

REQUIRED = ("calibration", "selection", "evaluation")
"""The parts that no run can do without."""


@dataclass(frozen=True)
class Document:
    """One text that is never divided between parts.

    Attributes:
        text: the text, paragraphs kept.
        source: where it came from, for messages: `file`, `file:line`, `file#row` or `set:row`.
    """

    text: str
    source: str

    @cached_property
    def sha256(self) -> str:
        """Hash of the text with every run of white space made one space, 64 hex digits."""
        return hashlib.sha256(" ".join(self.text.split()).encode()).hexdigest()
