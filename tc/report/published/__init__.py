"""The figures that arXiv 2606.16429 publishes, for setting ours beside them.

They lie beside this module as CSV with their source in `README.md`, and keep the paper's own names;
what a run of this package calls an init, a policy or a metric is translated here, and nowhere else.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

ZERO_SHOT, STAGE1, STAGE2, ABLATION = (
    *("zero_shot", "100M_tokens", "700M_tokens"),
    "ablation_zero_shot",
)
"""The stages of the paper's students: none, stage 1, and both of recovery; and its ablation."""

INITS = {
    "copy_only": "copy",
    "zero_gate": "zero_gate",
    "small_gate": "small_gate",
    "paper_phase1": "phase1",
    "phase1": "phase1",
    "paper_phase2": "phase2",
    "phase2": "phase2",
    "paper": "full",
    "full": "full",
    "taylor": "full",
}
"""The published init that stands beside each of ours; `paper_*` and `paper` are the paper's own."""

POLICIES = {"ratio": "uniform", "every2": "uniform", "every4": "uniform"}
POLICIES |= {"ar": "ar", "ga_s2": "ga_s2"}
"""The published policy of each of ours."""


@dataclass(frozen=True)
class Figure:
    """A published number.

    Attributes:
        teacher: as in `conf/teacher`.
        stage: what the student has been through, or `teacher`.
        share: of the layers, that keep attention; None where it is not stated.
        policy: `uniform`, `ar`, `ga_s2`; `all` of a teacher, `-` where it is not stated.
        init: the paper's name, `teacher` of a teacher.
        metric: as in the file, such as `wikitext2_ppl`, `arc_easy/acc` or `niah_single_1/4096`.
        value: a perplexity, or a share between 0 and 1.
    """

    teacher: str
    stage: str
    share: float | None
    policy: str
    init: str
    metric: str
    value: float


@dataclass(frozen=True)
class Target:
    """How many tokens of recovery a target took.

    Attributes:
        teacher: as in `conf/teacher`.
        policy: `uniform`, `ar` or `ga_s2`.
        target_ppl: the perplexity to reach, on WikiText-2.
        baseline_tokens_m, full_tokens_m: millions of tokens, None where it was not reached.
        full_is_upper_bound: whether `full` was there at its first look.
        speedup: the first over the second, as published.
        baseline_final_ppl, full_final_ppl: after all tokens.
    """

    teacher: str
    policy: str
    target_ppl: float
    baseline_tokens_m: float | None
    full_tokens_m: float | None
    full_is_upper_bound: bool
    speedup: float | None
    baseline_final_ppl: float
    full_final_ppl: float


def _rows(name: str) -> list[dict[str, str]]:
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@cache
def figures() -> tuple[Figure, ...]:
    """All figures of the paper's tables, in the order of the file."""
    return tuple(_figure(row) for row in _rows("paper_results.csv"))


def _figure(row: dict[str, str]) -> Figure:
    kept = row["attention_kept"]
    return Figure(
        teacher=row["teacher"].removesuffix(" (ablation)"),
        stage=row["stage"],
        share=None if kept == "?" else float(kept.rstrip("%")) / 100,
        policy=row["policy"],
        init=row["init"],
        metric=row["metric"],
        value=float(row["value"]),
    )


@cache
def targets() -> tuple[Target, ...]:
    """The paper's tokens to target, in the order of the file."""
    return tuple(_target(row) for row in _rows("token_budget.csv"))


def _target(row: dict[str, str]) -> Target:
    names = ("teacher", "policy")
    numbers: dict[str, Any] = {
        key: float(value) if value else None for key, value in row.items() if key not in names
    }
    numbers["full_is_upper_bound"] = bool(numbers["full_is_upper_bound"])
    return Target(row["teacher"], row["policy"], **numbers)


@cache
def _students() -> dict[tuple[str, str, float | None, str, str, str], float]:
    return {
        (f.teacher, f.stage, f.share, f.policy, f.init, f.metric): f.value
        for f in figures()
        if f.init != "teacher"
    }


def published(
    teacher: str, stage: str, share: float | None, policy: str, init: str, metric: str
) -> float | None:
    """The published value for a student, or None where there is none.

    Args:
        teacher: as in `conf/teacher`.
        stage: one of `ZERO_SHOT`, `STAGE1`, `STAGE2`, `ABLATION`.
        share: of the layers that keep attention, as asked for. `ABLATION` states none.
        policy: by our name; one that the paper does not have has no figure.
        init: by our name; likewise.
        metric: by the paper's name.
    """
    if stage == ABLATION:
        share, policy = None, "-"
    else:
        share, policy = None if share is None else round(share, 2), POLICIES.get(policy, "")
    return _students().get((teacher, stage, share, policy, INITS.get(init, ""), metric))


def published_teacher(teacher: str, stage: str, metric: str) -> float | None:
    """The published value for a teacher: as measured with the students of that stage, if it was.

    The teachers of 100M and 700M tokens stand under `teacher`; the ablation's is the zero-shot one.
    """
    stages = (ZERO_SHOT, "teacher") if stage in (ZERO_SHOT, ABLATION) else ("teacher", ZERO_SHOT)
    found = {
        f.stage: f.value
        for f in figures()
        if (f.teacher, f.init, f.metric) == (teacher, "teacher", metric)
    }
    return next((found[name] for name in stages if name in found), None)
