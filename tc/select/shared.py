"""Losses on disk, which any number of processes make together and any number of runs read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tc.artifacts import MANIFEST, Manifest, disk_errors, hash_of, read_json, write_json
from tc.errors import TCError
from tc.meter import Meter
from tc.select.losses import Loss, Variant

NUMBERS = ("loss", "seconds", "peak_rss_bytes")
"""What the file of a loss must have."""


class SharedLosses:
    """The losses of variants; each is a file of its own, written whole or not at all.

    Processes neither wait for each other nor lock anything: two that make the same loss at the
    same time lose time and nothing else. A killed one loses what it was at.

    Args:
        folder: of all losses that have the same makings.
        made_by: the facts that losses follow from, besides the variant.
        make: makes what computes a loss; called only if one is lacking.
        worker, workers: of the variants that are asked for together, this process makes every
            `workers`-th itself, then those of the others that are not there.
        progress: told of each variant that is done.

    Attributes:
        facts: of each loss that was asked for, what it took when it was made.
    """

    def __init__(
        self,
        folder: Path,
        made_by: dict[str, Any],
        make: Callable[[], Loss],
        worker: int = 0,
        workers: int = 1,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.folder, self.worker, self.workers = folder, worker, workers
        self.progress = progress
        self.facts: dict[Variant, dict[str, Any]] = {}
        self._make, self._made_by = make, made_by
        self._loss: Loss | None = None

    def __call__(self, variants: Sequence[Variant]) -> list[float]:
        """The losses, in order."""
        own = list(variants[self.worker :: self.workers])
        # From the back, where the processes they belong to come last.
        rest = [variant for variant in reversed(variants) if variant not in own]
        for variant in [*own, *rest]:
            self.facts[variant] = self._find(variant) or self._measure(variant)
            self.progress(1)
        return [self.facts[variant]["loss"] for variant in variants]

    def _file(self, variant: Variant) -> Path:
        # A student does not know in which order its layers were chosen.
        return self.folder / f"{hash_of(sorted(variant))}.json"

    def _find(self, variant: Variant) -> dict[str, Any] | None:
        path = self._file(variant)
        if not path.is_file():
            return None
        facts = read_json(path)
        whole = isinstance(facts, dict) and facts.get("layers") == sorted(variant)
        if not whole or not all(isinstance(facts.get(name), float | int) for name in NUMBERS):
            raise TCError(f"{path} is damaged; delete it and run again.")
        return facts

    def _measure(self, variant: Variant) -> dict[str, Any]:
        with Meter() as meter:
            if self._loss is None:
                self._loss = self._make()
            loss = self._loss(variant)
        facts = {"layers": sorted(variant), "loss": loss, **meter.facts()}
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / MANIFEST).is_file():
            write_json(self.folder / MANIFEST, vars(Manifest("selection", self._made_by)))
        write_json(self._file(variant), facts)
        return facts
