"""One measured number and what it says, in the one long format that tables and reports read."""

from __future__ import annotations

from dataclasses import asdict, dataclass


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
