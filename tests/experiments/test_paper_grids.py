"""Every job of every table of the paper composes, passes the checks and is priced, offline."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import price
import pytest
from composing import CONF, ROOT, composed, config

import tc.plan
from tc.config import Measure, register
from tc.report.published import INITS, POLICIES, ZERO_SHOT, figures

SLOW = pytest.mark.slow
NUM_JOBS = {
    "ablation": (9, 9),
    "layer_choice": (24, 12),
    "recovery": (72, 6),
    "ruler": (36, 3),
    "tokens_to_target": (36, 3),
    "zero_shot": (180, 45),
}
GRIDS = [
    pytest.param(f"{name}/{scale}", number, id=f"{name}/{scale}", marks=SLOW if number > 30 else ())
    for name, numbers in NUM_JOBS.items()
    for scale, number in zip(("paper", "embedded"), numbers, strict=True)
]


@pytest.fixture(autouse=True)
def _no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of this machine is not what these tests are about."""
    monkeypatch.setattr(tc.plan, "matmul_rate", lambda config: 1e12)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    register()


def test_every_experiment_has_both_scales_and_a_folder() -> None:
    found = {path.parent.name for path in CONF.glob("experiment/*/*.yaml")}
    assert found == set(NUM_JOBS)
    for name in found:
        assert {path.stem for path in CONF.glob(f"experiment/{name}/*.yaml")} == {
            "paper",
            "embedded",
        }
        assert (ROOT / "experiments" / name / "README.md").is_file()


@pytest.mark.parametrize(("experiment", "number"), GRIDS)
def test_every_job_passes_a_dry_run(experiment: str, number: int) -> None:
    jobs = price.jobs(experiment, [])
    assert len(jobs) == number
    folders = {c.run_dir for c, plan in price.priced(jobs) if plan.flops > 0}
    # No two jobs share a folder, or one would be refused, or taken for the other.
    assert len(folders) == number


def test_the_command_line_narrows_a_grid_and_wins() -> None:
    jobs = price.jobs("zero_shot/paper", ["teacher=tiny_qwen2", "policy=ar", "seed=3"])
    assert len(jobs) == 3 * 5
    assert all({"teacher=tiny_qwen2", "policy=ar", "seed=3"} < set(job) for job in jobs)


@pytest.mark.parametrize("name", sorted(NUM_JOBS))
def test_another_teacher_takes_one_word(name: str) -> None:
    job = price.jobs(f"{name}/embedded", ["teacher=smollm2_135m"])[0]
    ((cfg, _),) = price.priced([job])
    assert cfg.teacher.name == "smollm2_135m"


def _key(job: list[str]) -> tuple[str, float, str, str]:
    values = dict(override.split("=", 1) for override in job)
    policy, init = POLICIES[values["policy"]], INITS[values["init"]]
    return values["teacher"], float(values["policy.share"]), policy, init


def test_the_grid_has_every_published_student_but_those_of_the_small_gate() -> None:
    there = {
        (f.teacher, f.share, f.policy, f.init)
        for f in figures()
        if f.stage == ZERO_SHOT and f.init not in ("teacher", "small_gate")
    }
    here = {_key(job) for job in price.jobs("zero_shot/paper", [])}
    assert there <= here
    # A grid of one teacher less would not do.
    assert not there <= {key for key in here if key[0] != "qwen3_30b_a3b"}


@pytest.mark.parametrize("stage", ["100M_tokens", "700M_tokens"])
def test_recovery_has_every_published_student(stage: str) -> None:
    there = {
        (f.teacher, f.share, f.policy, f.init)
        for f in figures()
        if f.stage == stage and f.init != "teacher"
    }
    here = {_key(job) for job in price.jobs("recovery/paper", [])}
    assert there and there <= here


def test_recovery_is_the_papers() -> None:
    cfg = config("experiment=recovery/paper", "policy=ratio", "policy.share=0.25", "init=paper")
    one, two = cfg.recovery.stage1, cfg.recovery.stage2
    assert (one.tokens, one.sequence_length, one.batch_sequences) == (100_000_000, 512, 96)
    assert (one.lr_mixers, one.schedule.value, one.optimizer.value) == (1e-3, "cosine", "adamw")
    assert (two.tokens, two.sequence_length, two.batch_sequences) == (600_000_000, 4096, 32)
    assert (two.lr_mixers, two.lr_rest, two.kl, two.ce) == (1e-4, 7e-6, 1.0, 0.0)
    assert (cfg.data.calibration_tokens, cfg.data.sequence_length) == (1024, 256)
    assert (cfg.align.steps, cfg.align.lr_projections, cfg.align.lr_dynamics) == (300, 1e-4, 1e-3)
    assert cfg.eval.measures == [Measure.perplexity, Measure.corpus, Measure.tasks]
    assert (cfg.eval.corpus.context, cfg.eval.tasks.suites) == (2048, ["core"])
    # There is text for both stages: a document of fineweb-edu has about a thousand tokens.
    documents = cfg.data.shares["training"] * cfg.data.max_documents
    assert documents * 1000 > 1.1 * (one.tokens + two.tokens)


def test_recovery_ruler_and_tokens_to_target_have_the_same_students() -> None:
    job = ["teacher=qwen3_8b", "policy=ar", "policy.share=0.25", "init=paper"]
    job.append("recovery.stage2.tokens=600_000_000")
    names = ("recovery", "ruler", "tokens_to_target")
    folders = {composed(f"experiment={name}/paper", *job).run_dir for name in names}
    assert len(folders) == 1
    assert composed("experiment=ruler/paper", *job, "seed=1").run_dir not in folders
    ruler = config("experiment=ruler/paper", *job).eval
    assert (ruler.ruler.lengths, ruler.ruler.limit) == ([4096], 500)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_local_teacher_is_priced_from_its_config_alone(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    AutoConfig.for_model(architecture, **sizes, num_key_value_heads=2).save_pretrained(tmp_path)
    more = ["teacher=hf", f"teacher.path={tmp_path}", "policy=ga_s2", "init=full"]
    ((_, plan),) = price.priced(price.jobs("zero_shot/paper", [*more, "policy.share=0.25"]))
    assert (plan.geometry.num_hidden_layers, plan.num_kept) == (8, 2)


@SLOW
def test_one_command_runs_a_whole_grid(tmp_path: Path) -> None:
    command = [sys.executable, "run.py", "-m", "experiment=ablation/paper", "dry_run=true"]
    command += ["init=copy_only,paper", f"paths.output_dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^init:\n  name: (\w+)$", done.stdout, re.M) == ["copy_only", "paper"]
    # A launcher's own settings are not lost on the way, but refused where it has no such key.
    done = subprocess.run(
        [*command, "hydra.launcher.partition=x"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "partition" in done.stderr
