"""The paper's figures: all there, and found by our names."""

from __future__ import annotations

from collections import Counter

import pytest

from tc.report.published import (
    ABLATION,
    STAGE1,
    STAGE2,
    ZERO_SHOT,
    figures,
    published,
    published_teacher,
    targets,
)

TEACHERS = {"llama3_2_3b", "qwen2_5_1_5b", "qwen2_5_3b", "qwen3_8b", "qwen3_30b_a3b"}


def test_every_figure_is_read_and_none_twice() -> None:
    found = figures()
    assert Counter(figure.stage for figure in found) == {
        ZERO_SHOT: 3704,
        STAGE2: 804,
        STAGE1: 648,
        "teacher": 136,
        ABLATION: 95,
    }
    assert {figure.teacher for figure in found} == TEACHERS
    keys = {(f.teacher, f.stage, f.share, f.policy, f.init, f.metric) for f in found}
    assert len(keys) == len(found)
    shares = [f.value for f in found if not f.metric.endswith(("ppl", "perplexity"))]
    assert all(0 <= value <= 1 for value in shares)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("qwen3_8b", ZERO_SHOT, 0.75, "ratio", "paper", "wikitext2_ppl"), 11.42),
        (("qwen3_8b", ZERO_SHOT, 0.75, "ratio", "copy_only", "wikitext2_ppl"), 19.24),
        (("qwen3_8b", ZERO_SHOT, 0.25, "ga_s2", "paper_phase1", "wikitext2_ppl"), 16970.42),
        (("qwen2_5_3b", STAGE2, 0.25, "ar", "paper", "wikitext2_ppl"), 9.0932),
        # Every fourth of 28 or 36 layers: its share comes out as 0.25.
        (("llama3_2_3b", STAGE1, 7 / 28, "every4", "full", "wikitext2_ppl"), 17.41),
        (("qwen2_5_3b", ABLATION, 0.3, "every4", "paper_phase2", "wikitext2_ppl"), 2015.91),
        (("qwen3_8b", ZERO_SHOT, 0.75, "greedy", "paper", "wikitext2_ppl"), None),
        (("qwen3_8b", ZERO_SHOT, 0.75, "ratio", "closed_form", "wikitext2_ppl"), None),
        (("tiny_llama", ZERO_SHOT, 0.75, "ratio", "paper", "wikitext2_ppl"), None),
        (("qwen3_8b", STAGE2, 0.25, "ratio", "paper", "wikitext2_ppl"), None),
    ],
)
def test_a_student_is_found_by_our_names(key: tuple, value: float | None) -> None:
    assert published(*key) == value


def test_a_teacher_is_the_one_of_its_stage() -> None:
    assert published_teacher("qwen3_8b", ZERO_SHOT, "mmlu/acc") == 0.7302
    assert published_teacher("qwen3_8b", STAGE2, "mmlu/acc") == 0.7493
    assert published_teacher("qwen2_5_3b", ABLATION, "wikitext2_ppl") == 8.56
    assert published_teacher("tiny_llama", ZERO_SHOT, "mmlu/acc") is None


def test_tokens_to_target() -> None:
    found = targets()
    assert len(found) == 26
    assert found[3].baseline_tokens_m == 599.9
    assert found[0].baseline_tokens_m is None
    # A speedup is what its two columns give, but where it is published as one of a bound.
    for target in found:
        if target.baseline_tokens_m and target.full_tokens_m:
            assert target.speedup == pytest.approx(
                target.baseline_tokens_m / target.full_tokens_m, abs=0.06
            )
        else:
            assert target.speedup is None
