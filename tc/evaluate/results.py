"""One measured number and what it says, in the one long format that tables and reports read."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tc.artifacts import write_text
from tc.errors import TCError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """A measured value.

    Attributes:
        measure: the kind of measurement, such as `perplexity`, `tasks` or `ruler`.
        task: what was measured: a text, a task's name.
        metric: which number of it, such as `acc`, `nll` or `decode_tokens_per_second`.
        value: the number.
        stderr: its standard error, None where it has none.
        samples: what it is a mean of: tokens, questions, repeats.
        context: the context length in tokens that it holds for, None where there is none.
        position: the first position in the context that it holds for, None for all.
    """

    measure: str
    task: str
    metric: str
    value: float
    stderr: float | None = None
    samples: int | None = None
    context: int | None = None
    position: int | None = None

    def to_dict(self) -> dict[str, str | float | int | None]:
        """The fields as plain values."""
        return asdict(self)

    @property
    def name(self) -> str:
        """The number's name among a model's scalars, such as `corpus/wikitext2/nll@2048`."""
        by = "" if self.position is None else "_by_position"
        at = "" if self.context is None else f"@{self.context}"
        return f"{self.measure}/{self.task}/{self.metric}{by}{at}"


COLUMNS = ("model", *(field.name for field in fields(Result)))
"""Of the long table."""

Results = dict[str, list[Result]]
"""What was measured, by the model's name."""


def write_results(path: Path, results: Mapping[str, list[Result]]) -> None:
    """Writes the results of several models as one CSV table, a row a number."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for model, found in results.items():
        writer.writerows({"model": model, **result.to_dict()} for result in found)
    write_text(path, text.getvalue())


def read_results(path: Path) -> Results:
    """Reads what `write_results` wrote.

    Raises:
        TCError: if it is not such a table.
    """
    results: Results = {}
    try:
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                results.setdefault(row.pop("model"), []).append(_result(row))
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise TCError(
            f"{path} is no table of results ({error}); delete it and run again."
        ) from error
    return results


def _result(row: dict[str, Any]) -> Result:
    kinds = {"value": float, "stderr": float, "samples": int, "context": int, "position": int}
    cells: dict[str, Any] = {}
    for name, text in row.items():
        kind = kinds.get(name)
        cells[name] = text if kind is None else kind(text) if text else None
    return Result(**cells)


def merged(before: Results, now: Results) -> Results:
    """Results of now, and those of before that are of other models or other measures."""
    table = {model: list(found) for model, found in before.items()}
    for model, found in now.items():
        again = {result.measure for result in found}
        kept = [result for result in table.get(model, []) if result.measure not in again]
        table[model] = kept + found
    return table


def adding_up(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """What is told how much each step has done, and tells `progress` all of it, and of how much."""
    done = 0

    def advance(step: int) -> None:
        nonlocal done
        done += step
        progress(done, total)

    return advance


def warn_beyond(model: PreTrainedModel, what: str, length: int) -> None:
    """Says in the log where a context is longer than the model was made for."""
    window = getattr(model.config, "max_position_embeddings", length)
    if length > window:
        log.warning("%s at %d tokens: the model's own window is %d", what, length, window)
