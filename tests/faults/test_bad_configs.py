"""Configurations that cannot be run: each ends in one message, before anything is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from fault_helpers import base, said_by_run

from tc.check import AT_LEAST
from tc.config import GROUPS, typed

SEARCH = ("policy=greedy",)
TASKS = ("eval=offline",)


def floats(value: Any, prefix: str = "") -> Iterator[str]:
    """The keys of all numbers of a configuration that are not whole ones."""
    for field in fields(value):
        key, held = f"{prefix}{field.name}", getattr(value, field.name)
        if is_dataclass(held):
            yield from floats(held, f"{key}.")
        elif "float" in str(get_type_hints(type(value))[field.name]).split("[")[0] or isinstance(
            held, float
        ):
            yield key


FLOATS = sorted(floats(typed(base())))
TOO_SMALL = [(f"{key}={least - 1}", key) for key, least in AT_LEAST.items()]
NOT_FINITE = [(f"{key}={value}", key) for key in FLOATS for value in ("inf", "nan")]
UNKNOWN = [(f"{group}.nonsense=1", "nonsense") for group in GROUPS]
WRONG_TYPE = [
    *[(f"{key}=many", key.split(".")[-1]) for key in list(AT_LEAST)[::6]],
    *[(f"{key}=[1]", key.split(".")[-1]) for key in FLOATS[::4]],
    *[(f"{key}=maybe", key.split(".")[-1]) for key in ("resume", "dry_run", "init.align")],
    ("seed=1.5", "Integer"),
    ("seed=null", "seed"),
    ("teacher.dtype=float8", "float8"),
    ("trainer.backend=cuda", "cuda"),
    ("trainer.precision=int8", "int8"),
    ("init.decay=[fla]", "decay"),
    ("stages=data", "stages"),
    ("eval.measures=[speed]", "speed"),
    ("policy.keep=0", "keep"),
    ("data.path=texts", "path"),
    ("teacher.model=[]", "model"),
    ("data.shares=1", "shares"),
    ("run_dir=null", "run_dir"),
    ("run_dir=", "run_dir"),
    ("paths.cache_dir=", "paths.cache_dir"),
    ("paths.output_dir=", "output_dir"),
    ("teacher.name=", "teacher.name"),
]
WRONG_VALUE = [
    ("stages=[]", "stages=[]"),
    ("stages=[data,dta]", "dta"),
    ("stages=[data,data]", "stages"),
    ("eval.measures=[]", "eval.measures=[]"),
    ("eval.measures=[perplexity,perplexity]", "each once"),
    ("eval.stride=65", "eval.stride=65"),
    ("policy.stride=null", "policy.stride has no value"),
    ("policy.share=0.5", "policy.share=0.5 would be ignored"),
    ("policy.keep=[0]", "policy.keep=[0] would be ignored"),
    ("policy.workers=2", "policy.workers=2 would be ignored"),
    ("data.calibration_tokens=63", "less than one sequence"),
    ("data.selection_tokens=63", "less than one sequence"),
    ("data.shares={calibration:1}", "data.shares"),
    ("data.shares={calibration:0.5,training:0.5,selection:0.5,evaluation:0.5}", "add up to"),
    ("data.shares={calibration:2,training:-1,selection:0,evaluation:0}", "data.shares.training"),
    ("data.shares={calibration:0,training:0.5,selection:0.25,evaluation:0.25}", "needs text"),
    ("data.dataset=x", "data.dataset has no effect"),
    ("data.text_column=body", "data.text_column has no effect"),
    ("data.max_documents=9", "data.max_documents has no effect"),
    ("data.path=[x]", "data.path has no effect"),
    ("init.ridge=[]", "init.ridge"),
    ("init.ridge=[0.1,-1]", "init.ridge"),
    ("init.ridge=[0.1,inf]", "init.ridge"),
    ("init.gate_rms=0", "init.gate_rms"),
    ("init.half_life_scale=0", "init.half_life_scale"),
    ("init.beta_low=2", "init.beta_low"),
    ("student.norm_eps=0", "student.norm_eps"),
    ("align.gradient_clip=0", "align.gradient_clip"),
    ("recovery.stage2.gradient_clip=-1", "recovery.stage2.gradient_clip"),
    ("recovery.stage2.decay_share=0", "recovery.stage2.decay_share"),
    ("recovery.stage2.decay_share=1.1", "recovery.stage2.decay_share"),
    ("recovery.stage2.warmup_tokens=513", "recovery.stage2.warmup_tokens"),
    ("recovery.stage2.micro_sequences=3", "cannot be dealt"),
    ("recovery.stage2.kl=0", "no loss"),
    ("recovery.stage2.temperature=0", "recovery.stage2.temperature"),
    ("recovery.validation_tokens=63", "recovery.validation_tokens"),
    ("recovery.stage1.lr_mixers=1", "recovery.stage1.lr_mixers"),
    ("trainer.devices=2", "trainer=ddp"),
    ("trainer.nodes=2", "trainer=ddp"),
    ("trainer.backend=fla", "trainer.backend=fla"),
    ("trainer.threads=100000", "trainer.threads"),
    ("seed=99999999999999999999", "seed"),
    ("student.path=/nowhere", "student.path=/nowhere"),
    ("student.path=.", "student.path=."),
    ("logger.project=other", "logger.project=other would be ignored"),
    ("logger.group=other", "logger.group=other would be ignored"),
    ("logger.offline=true", "logger.offline=True would be ignored"),
    ("eval.tasks.limit=3", "eval.tasks.limit=3 would be ignored"),
    ("eval.positions.tokens=64", "eval.positions.tokens=64 would be ignored"),
    ("eval.corpus.tokens=64", "would be ignored"),
    ("eval.ruler.limit=1", "would be ignored"),
    ("eval.generation.tokens=1", "would be ignored"),
    ("teacher.path=x", "teacher.path=x would be ignored"),
    ("teacher.package=x", "teacher.package=x would be ignored"),
    ("teacher.revision=main", "teacher.revision=main would be ignored"),
    ("teacher.sha256=00", "teacher.sha256=00 would be ignored"),
    ("teacher.requirement=x", "teacher.requirement=x would be ignored"),
    ("teacher.architecture=gpt2", "gpt2"),
    ("teacher.model.num_hidden_layers=0", "num_hidden_layers"),
    ("teacher.model.num_hidden_layers=-1", "num_hidden_layers"),
    ("teacher.model.num_attention_heads=0", "num_attention_heads"),
    ("teacher.model.num_attention_heads=3", "num_"),
    ("teacher.model.num_key_value_heads=3", "num_key_value_heads"),
    ("teacher.model.hidden_size=0", "hidden_size"),
    ("teacher.model.head_dim=15", "head_dim"),
    ("teacher.model.hidden_size=big", "hidden_size"),
    ("teacher.model.vocab_size=100", "vocab_size"),
    ("+teacher.model.hiden_size=64", "hiden_size"),
    ("teacher.model.rope_parameters={rope_type:nonsense,rope_theta:1e4}", "nonsense"),
    ("teacher.model.rope_parameters.rope_theta=0", "rope_theta"),
]
POLICIES = [
    (("policy=layers",), (), "policy.keep has no value"),
    (("policy=layers",), ("policy.keep=[3]",), "layers 0 to 2"),
    (("policy=layers",), ("policy.keep=[-1]",), "-1"),
    (("policy=layers",), ("policy.keep=[1,1]",), "twice"),
    (("policy=qwen2_5_1_5b_ar",), (), "28 layers"),
    (SEARCH, ("policy.count=9", "policy.share=null"), "policy.count=9"),
    (SEARCH, ("policy.count=1", "policy.share=0.5"), "one of the two"),
    (SEARCH, ("policy.count=null", "policy.share=null"), "one of the two"),
    (SEARCH, ("policy.share=1.5",), "policy.share=1.5"),
    (SEARCH, ("policy.share=0.01",), "keeps none"),
    (SEARCH, ("policy.tokens=1",), "less than one sequence"),
    (SEARCH, ("policy.worker=1",), "policy.worker=1"),
    (("data=files",), (), "data.path is empty"),
    (("data=files",), ("data.path=[nothing/*.txt]",), "matches no file"),
    (("data=files",), ("data.calibration=[a]",), "go together"),
    (("init=copy_only",), ("align.steps=9",), "would be ignored"),
    (("init=copy_only",), ("init.half_life_scale=2",), "would be ignored"),
    (("init=copy_only",), ("init.gate_rms=0.5",), "would be ignored"),
    (("init=copy_only",), ("init.beta_low=0.1",), "would be ignored"),
    (("init=copy_only",), ("init.sinks=keep",), "would be ignored"),
    (("init=copy_only",), ("init.centre_decay=false",), "would be ignored"),
    (("init=copy_only",), ("init.ridge=[0.5]",), "would be ignored"),
]


@pytest.fixture(autouse=True)
def _no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that passes for a good one fails here at once, and not after its run."""

    def begin(*args: object) -> None:
        pytest.fail("the run begins")

    monkeypatch.setattr("tc.pipeline.RunFolder", begin)


@pytest.mark.parametrize(
    ("override", "word"), [*TOO_SMALL, *NOT_FINITE, *UNKNOWN, *WRONG_TYPE, *WRONG_VALUE]
)
def test_one_wrong_value(override: str, word: str, tmp_path: Path) -> None:
    assert word in said_by_run(tmp_path, override)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("groups", "overrides", "word"), POLICIES)
def test_what_does_not_go_together(
    groups: tuple[str, ...], overrides: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    assert word in said_by_run(tmp_path, *overrides, groups=groups)
    assert list(tmp_path.iterdir()) == []
