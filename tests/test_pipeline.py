"""The whole pipeline on tiny random teachers: artifacts, resuming, seeds, refusals."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import RANDOM_TEACHERS, composed, group
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tc.pipeline
from tc.artifacts import Manifest, find, hash_file, load_tensors
from tc.config import STAGES
from tc.data import Document, Packed
from tc.errors import TCError
from tc.evaluate import Result, read_results
from tc.pipeline import Pipeline, run
from tc.teacher import load_teacher

SMOKE = ["experiment=smoke", "trainer=cpu"]


def go(folder: Path, *overrides: str) -> dict[str, Any]:
    """Runs the smoke configuration into `folder` and returns its metrics."""
    places = [f"run_dir={folder}", f"paths.cache_dir={folder.parent / 'cache'}"]
    run(composed(*SMOKE, *places, *overrides))
    return json.loads((folder / "metrics.json").read_text())


@pytest.mark.parametrize("teacher", RANDOM_TEACHERS)
def test_every_architecture_goes_through(teacher: str, tmp_path: Path) -> None:
    metrics = go(tmp_path / "run", f"teacher={teacher}")
    for name in ("teacher", "copy_only", "student"):
        assert metrics[f"{name}/perplexity"] > 1
    assert metrics["calibration_tokens"] == 512
    assert metrics["evaluation_tokens"] == 256
    for stage in (*(name for name in STAGES if name != "select"), "total"):
        assert metrics[f"{stage}/seconds"] >= 0
        assert metrics[f"{stage}/peak_rss_bytes"] > 1e7
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "student")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "student")
    ids = tokenizer("My fellow Americans", return_tensors="pt").input_ids
    assert student.generate(ids, max_new_tokens=3, do_sample=False).shape[1] == ids.shape[1] + 3


@pytest.mark.parametrize("teacher", ["random_llama", "random_qwen3"])
def test_a_bfloat16_teacher_gives_a_bfloat16_student(teacher: str, tmp_path: Path) -> None:
    go(tmp_path / "run", f"teacher={teacher}", "teacher.dtype=bfloat16")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "student")
    for name, value in student.state_dict().items():
        wide = name.endswith(("A_log", "dt_bias"))
        assert value.dtype == (torch.float32 if wide else torch.bfloat16), name


@pytest.mark.parametrize(
    "init", ["copy_only", "zero_gate", "phase1", "closed_form", "phase2", "taylor", "paper"]
)
def test_every_init_goes_through(init: str, tmp_path: Path) -> None:
    small = ["align.steps=3"] if init in ("phase2", "taylor", "paper") else []
    metrics = go(tmp_path / "run", f"init={init}", "recovery=none", *small)
    if init == "copy_only":
        assert metrics["student/perplexity"] == metrics["copy_only/perplexity"]
    assert ("align/seconds" in metrics) == bool(small)


def test_run_folder_is_the_documented_contract(tmp_path: Path) -> None:
    go(tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        ".run.lock",
        "align",
        "artifacts.json",
        "blocks",
        "code.diff",
        "config.yaml",
        "curves",
        "data",
        "environment.json",
        "evaluate",
        "init",
        "metrics.csv",
        "metrics.json",
        "recover",
        "results.csv",
        "run.log",
        "science.json",
        "student",
    }
    artifacts = json.loads((tmp_path / "run" / "artifacts.json").read_text())
    assert {"data", "student", "init/layer_001", "align/layer_001"} <= set(artifacts)
    assert {"blocks/block_001", "recover/stage2/done"} <= set(artifacts)
    assert {"evaluate/student", "evaluate/zero_shot"} <= set(artifacts)
    assert {"calibration", "training text"} <= set(artifacts)
    assert {"evaluation of teacher", "evaluation of copy_only"} <= set(artifacts)
    for facts in artifacts.values():
        for name, file in facts["files"].items():
            assert hash_file(Path(facts["folder"]) / name) == file["sha256"]
    curve = (tmp_path / "run" / "curves" / "metrics.csv").read_text()
    assert "align/held_out_error" in curve
    assert "recover/stage2/perplexity" in curve
    assert (tmp_path / "run" / "recover" / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_the_four_parts_are_disjoint_and_recorded(tmp_path: Path) -> None:
    go(tmp_path / "run", "stages=[data]")
    record = json.loads((tmp_path / "run" / "data" / "splits.json").read_text())
    parts = {name: set(part["hashes"]) for name, part in record["parts"].items()}
    assert set(parts) == {"calibration", "training", "selection", "evaluation"}
    assert sum(map(len, parts.values())) == len(set.union(*parts.values())) > 200


def test_changed_text_is_told_apart(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(8):
        (texts / f"{i}.txt").write_text(f"document {i}: " + "some words of its own. " * 80)
    options = ["data=files", f"data.path=[{texts}/*.txt]", "stages=[data]"]
    go(tmp_path / "run", *options)
    go(tmp_path / "run", *options)
    (texts / "3.txt").write_text("something else. " * 100)
    with pytest.raises(TCError, match="sources: "):
        go(tmp_path / "run", *options)


def test_policy_all_is_the_teacher(tmp_path: Path) -> None:
    metrics = go(tmp_path / "run", "policy=all")
    assert metrics["student/perplexity"] == metrics["teacher/perplexity"]


def test_policy_none_converts_every_layer(tmp_path: Path) -> None:
    go(tmp_path / "run", "policy=none")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "student")
    assert list(student.mixers) == list(range(student.config.num_hidden_layers))


def test_blocks_learn_what_the_teachers_next_layer_reads(tmp_path: Path) -> None:
    """The errors on record are those of the saved student against the teacher, block by block."""
    go(tmp_path / "run", "policy=none", "align.block_layers=1", "recovery=none")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "student").eval()
    teacher = load_teacher(group("teacher", "random_llama"), tmp_path / "cache").model
    tokens = load_tensors(tmp_path / "run" / "data" / "tokens.safetensors")
    given = {"input_ids": tokens["selection_ids"], "position_ids": tokens["selection_positions"]}

    def reads(model: Any) -> list[torch.Tensor]:
        """What each layer reads, and at last what the head reads."""
        seen: list[torch.Tensor] = []
        norms = [*(layer.input_layernorm for layer in model.model.layers), model.model.norm]
        hooks = [n.register_forward_hook(lambda m, a, y: seen.append(y)) for n in norms]
        with torch.no_grad():
            model.model(**given, use_cache=False)
        for hook in hooks:
            hook.remove()
        return seen

    for i, (x, want) in enumerate(zip(reads(student), reads(teacher), strict=True)):
        if i > 0:
            record = tmp_path / "run" / "blocks" / f"block_{i - 1:03d}" / "manifest.json"
            error = float((x - want).square().sum() / want.square().sum())
            info = json.loads(record.read_text())["info"]
            assert info["error"] == pytest.approx(error, rel=1e-3)
            assert info["error"] <= info["before"]


SEARCHES = ["ar", "ga_s2", "greedy"]


@pytest.mark.parametrize("policy", SEARCHES)
def test_a_search_chooses_the_layers_of_the_student(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tables = tmp_path / "run", {}
    monkeypatch.setattr(
        tc.pipeline, "log_table", lambda _, name, *table: tables.update({name: table})
    )
    metrics = go(folder, f"policy={policy}", "policy.share=0.67")
    student = AutoModelForCausalLM.from_pretrained(folder / "student")
    kept = [int(i) for i in metrics["select/kept"].split(", ")]
    assert len(kept) == 2 and sorted([*kept, *student.mixers]) == [0, 1, 2]
    # Students need a mixer of every layer; where layers of the teacher compete, only a chosen one.
    made = [int(path.name[-3:]) for path in sorted((folder / "align").iterdir())]
    assert made == (list(student.mixers) if policy == "ar" else [0, 1, 2])
    assert metrics["select/seconds"] > 0
    assert metrics["select/scores"] == (6 if policy == "greedy" else 4)
    scores = (folder / "select" / "scores.csv").read_text().splitlines()
    assert scores[0] == "round,layer,loss,score,kept"
    assert len(scores) == metrics["select/scores"]
    assert {int(row.split(",")[1]) for row in scores if row.endswith(",True")} == set(kept)
    assert f"Kept: {metrics['select/kept']}." in (folder / "select" / "table.md").read_text()
    assert (folder / "select" / "scores.png").read_bytes()[:4] == b"\x89PNG"
    artifacts = json.loads((folder / "artifacts.json").read_text())
    assert {"select", "scores of layers"} <= set(artifacts)
    assert tables["select"][1] == [[policy, metrics["select/kept"]]]
    assert len(tables["scores of layers"][1]) == metrics["select/scores"] - 1


def test_a_search_keeps_as_many_layers_as_there_are_at_most(tmp_path: Path) -> None:
    with pytest.raises(TCError, match=r"policy\.count=4: the teacher has 3 layers"):
        go(tmp_path / "run", "policy=greedy", "policy.count=4")
    with pytest.raises(TCError, match=r"policy\.share=0\.1 keeps none of 3 layers"):
        go(tmp_path / "run", "policy=ar", "policy.share=0.1")
    metrics = go(tmp_path / "run", "policy=greedy", "policy.count=3")
    assert metrics["student/perplexity"] == metrics["teacher/perplexity"]


def test_searches_share_scores_and_redo_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = go(tmp_path / "one", "policy=greedy", "policy.count=2")
    again = go(tmp_path / "one", "policy=greedy", "policy.count=2")
    assert again["select/reused"] and again["select/seconds"] == first["select/seconds"]
    monkeypatch.setattr(tc.pipeline, "HybridLoss", None)
    fewer = go(tmp_path / "two", "policy=greedy", "policy.count=1")
    single = go(tmp_path / "three", "policy=ga_s2", "policy.count=1")
    assert fewer["select/kept"] == single["select/kept"]
    with pytest.raises(TypeError):
        go(tmp_path / "four", "policy=greedy", "policy.count=1", "align.steps=3")


@pytest.mark.parametrize("policy", SEARCHES)
def test_scores_never_see_evaluation_text(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is scored on is the head of the selection part; other evaluation text, same scores."""
    seen: list[Packed] = []
    name = "BypassLoss" if policy == "ar" else "HybridLoss"
    real = getattr(tc.pipeline, name)

    def noting(*args: Any) -> Any:
        seen.append(args[-1])
        return real(*args)

    monkeypatch.setattr(tc.pipeline, name, noting)
    options = [f"policy={policy}", "policy.count=1", "policy.tokens=64"]
    go(tmp_path / "one", *options)
    tokens = load_tensors(tmp_path / "one" / "data" / "tokens.safetensors")
    (text,) = seen
    assert torch.equal(text.input_ids, tokens["selection_ids"][:1])
    assert torch.equal(text.position_ids, tokens["selection_positions"][:1])
    assert not torch.equal(text.input_ids, tokens["evaluation_ids"][:1])
    go(tmp_path / "two", *options, "eval.tokens=128")
    assert len(seen) == 1  # found: nothing that the scores follow from is of the evaluation
    go(tmp_path / "three", *options[:2], "policy.tokens=128")
    assert len(seen) == 2


def test_a_stopped_search_continues_score_by_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["policy=greedy", "policy.count=2", "stages=[data,calibrate,initialise,align,select]"]
    want = go(tmp_path / "whole" / "run", *options)["select/kept"]
    real, asked = tc.pipeline.HybridLoss, []

    class Stopping(real):
        def __call__(self, variant: Any) -> float:
            if len(asked) == 3:
                raise KeyboardInterrupt
            asked.append(variant)
            return super().__call__(variant)

    monkeypatch.setattr(tc.pipeline, "HybridLoss", Stopping)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "stopped" / "run", *options)
    assert not (tmp_path / "stopped" / "run" / "select").exists()
    monkeypatch.setattr(tc.pipeline, "HybridLoss", real)
    metrics = go(tmp_path / "stopped" / "run", *options)
    assert metrics["select/kept"] == want
    done = list((tmp_path / "stopped" / "cache").glob("selections/*/*.json"))
    assert len(done) == 1 + metrics["select/scores"] and len(asked) == 3


def test_a_second_worker_leaves_the_first_one_nothing_to_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["policy=greedy", "policy.count=2", "policy.workers=2"]
    helper = [*options, "policy.worker=1"]
    folder = tmp_path / "run"
    places = [f"run_dir={folder}", f"paths.cache_dir={tmp_path / 'cache'}"]
    with pytest.raises(TCError, match=r"begin with policy\.worker=0"):
        run(composed(*SMOKE, *places, *helper))
    assert not folder.exists()
    go(folder, *options, "stages=[data,calibrate,initialise,align]")
    before = sorted(folder.rglob("*"))
    assert run(composed(*SMOKE, *places, *helper)) is None
    assert sorted(folder.rglob("*")) == before
    monkeypatch.setattr(tc.pipeline, "HybridLoss", None)
    shared = go(folder, *options)
    monkeypatch.undo()
    alone = go(tmp_path / "alone" / "run", "policy=greedy", "policy.count=2")
    for key in ("select/kept", "student/perplexity"):
        assert shared[key] == alone[key]


def test_later_stages_need_the_search(tmp_path: Path) -> None:
    options = ["policy=ga_s2", "policy.count=1"]
    go(tmp_path / "run", *options, "stages=[data,calibrate,initialise,align]")
    with pytest.raises(TCError, match="stage select has left nothing"):
        go(tmp_path / "run", *options, "stages=[blocks]")
    go(tmp_path / "run", *options, "stages=[select]")
    go(tmp_path / "run", *options, "stages=[blocks]")


def test_a_published_list_is_for_teachers_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tc.pipeline, "load_teacher", None)
    with pytest.raises(TCError, match=r"qwen2_5_1_5b_ar is a list for 28 layers; .* has 3"):
        go(tmp_path / "run", "policy=qwen2_5_1_5b_ar", "policy.stride=null", "policy.keep=[0]")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder / "student")
    return model.state_dict()


def test_same_seed_same_student_another_seed_another(tmp_path: Path) -> None:
    # Separate caches: nothing of the first run can help the second.
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        go(tmp_path / name / "run", f"seed={seed}")
    a, b, c = (weights(tmp_path / name / "run") for name in "abc")
    assert all(torch.equal(a[k], b[k]) for k in a)
    mixer = "model.layers.1.self_attn."
    assert any(not torch.equal(a[k], c[k]) for k in a if k.startswith(mixer))


def test_a_finished_run_is_not_redone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = go(tmp_path / "run")
    redone = ("calibrate", "initialise", "align_layer", "align_block", "perplexity", "write_tokens")
    for name in redone:
        monkeypatch.setattr(tc.pipeline, name, None)
    second = go(tmp_path / "run")
    for key in ("student/perplexity", "align/seconds", "calibrate/seconds"):
        assert first[key] == second[key]
    assert second["align/reused"]
    assert not first["align/reused"]


def test_a_stopped_run_continues_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["policy=none"]
    whole = tmp_path / "whole"
    go(whole, *options)
    stopped, real, done = tmp_path / "stopped", tc.pipeline.align_layer, []

    def fails_at_second(mixer: Any, *args: Any) -> Any:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(mixer.layer_idx)
        return real(mixer, *args)

    monkeypatch.setattr(tc.pipeline, "align_layer", fails_at_second)
    with pytest.raises(KeyboardInterrupt):
        go(stopped, *options)
    assert [p.name for p in (stopped / "align").iterdir()] == ["layer_000"]

    def records(mixer: Any, *args: Any) -> Any:
        done.append(mixer.layer_idx)
        return real(mixer, *args)

    monkeypatch.setattr(tc.pipeline, "align_layer", records)
    go(stopped, *options)
    assert sorted(done) == sorted(set(done))
    a, b = weights(whole), weights(stopped)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_what_a_killed_run_left_unfinished_is_removed(tmp_path: Path) -> None:
    go(tmp_path / "run", "stages=[data]")
    unfinished = tmp_path / "run" / "align" / ".layer_001.x1y2" / "layer_001"
    unfinished.mkdir(parents=True)
    go(tmp_path / "run", "stages=[data]")
    assert not unfinished.parent.exists()


def test_runs_share_calibration_and_the_teachers_perplexity(tmp_path: Path) -> None:
    first = go(tmp_path / "one")
    second = go(tmp_path / "two", "policy=none")
    assert not first["calibrate/reused"]
    assert second["calibrate/reused"]
    assert second["evaluate_teacher/reused"]
    assert not second["evaluate_copy_only/reused"]


def test_stages_run_alone_and_need_the_earlier_ones(tmp_path: Path) -> None:
    go(tmp_path / "run", "stages=[data]")
    assert not (tmp_path / "run" / "init").exists()
    with pytest.raises(TCError, match="stage calibrate has left nothing"):
        go(tmp_path / "run", "stages=[initialise]")
    go(tmp_path / "run", "stages=[calibrate,initialise]")
    go(tmp_path / "run", "stages=[align]")
    with pytest.raises(TCError, match="stage blocks has left nothing"):
        go(tmp_path / "run", "stages=[student]")
    go(tmp_path / "run", "stages=[blocks]")
    with pytest.raises(TCError, match="stage recover stage2 has left nothing"):
        go(tmp_path / "run", "stages=[student]")
    go(tmp_path / "run", "stages=[recover,student]")
    metrics = go(tmp_path / "run", "stages=[evaluate]")
    assert {"student/perplexity", "calibration_tokens", "align/seconds"} <= set(metrics)


def test_a_folder_of_another_configuration_is_told_apart(tmp_path: Path) -> None:
    go(tmp_path / "run", "stages=[data]")
    before = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(TCError, match="seed: 0 -> 1") as error:
        go(tmp_path / "run", "stages=[data]", "seed=1")
    assert "resume=false" in str(error.value)
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    go(tmp_path / "run", "stages=[data]", "seed=1", "resume=false")
    assert "seed: 1" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    for resume in ("true", "false"):
        with pytest.raises(TCError, match="is not the folder of a run"):
            go(tmp_path / "run", f"resume={resume}")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_damaged_artifact_is_named(tmp_path: Path) -> None:
    go(tmp_path / "run")
    victim = tmp_path / "run" / "align" / "layer_001" / "mixer.safetensors"
    victim.write_bytes(victim.read_bytes()[:-7])
    with pytest.raises(TCError, match="layer_001 is damaged"):
        go(tmp_path / "run")


def test_a_missing_calibration_is_an_error_not_a_warning(tmp_path: Path) -> None:
    """Fault 10 of the published code: a calibrated checkpoint that is not there."""
    go(tmp_path / "run", "stages=[data,calibrate]")
    shutil.rmtree(tmp_path / "cache" / "calibrations")
    with pytest.raises(TCError, match="stage calibrate has left nothing"):
        go(tmp_path / "run", "stages=[initialise]")


def test_code_of_another_version_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path / "run")
    monkeypatch.setattr(tc.pipeline, "code_version", lambda room: f"other {room}")
    with pytest.raises(TCError, match=r"code: .* -> other data"):
        go(tmp_path / "run")


def test_a_layer_that_the_teacher_lacks_is_refused_before_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tc.pipeline, "load_teacher", None)
    with pytest.raises(TCError, match="layers 0 to 2 are allowed"):
        go(tmp_path / "run", "policy=layers", "policy.stride=null", "policy.keep=[0,3]")
    assert not (tmp_path / "run").exists()


def test_nan_in_the_teacher_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tc.pipeline.load_teacher

    def poisoned(*args: Any) -> Any:
        teacher = real(*args)
        teacher.model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = float("nan")
        return teacher

    monkeypatch.setattr(tc.pipeline, "load_teacher", poisoned)
    with pytest.raises(TCError, match=r"not finite|NaN"):
        go(tmp_path / "run")
    assert not (tmp_path / "run" / "init").exists()
    assert not list((tmp_path / "cache" / "calibrations").glob("[!.]*"))


def test_dry_run_loads_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tc.pipeline, "load_teacher", None)
    run(composed("teacher=qwen3_8b", "init=taylor", "dry_run=true", f"run_dir={tmp_path}/run"))
    said = capsys.readouterr().out
    assert "9: 0, 4, 8, 12, 16, 20, 24, 28, 32" in said
    assert "8,190,735,360" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("policy", "scores"), [("ar", 37), ("ga_s2", 37), ("greedy", 289)])
def test_dry_run_prices_a_search(
    policy: str,
    scores: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tc.pipeline, "load_teacher", None)
    options = [f"policy={policy}", "policy.count=9", f"run_dir={tmp_path}/run"]
    run(composed("teacher=qwen3_8b", "dry_run=true", *options))
    assert f"9, chosen by {scores} scores" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_too_little_disk_is_seen_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 0))
    with pytest.raises(TCError, match="Free some space"):
        go(tmp_path / "run")
    assert not (tmp_path / "run" / "init").exists()


MEASURES = [
    "eval.measures=[perplexity,positions,corpus,generation]",
    "eval.positions.contexts=[32,128]",
    "eval.positions.tokens=512",
    "eval.corpus.context=64",
    "eval.generation.contexts=[16,32]",
    "eval.generation.tokens=2",
    "eval.generation.repeats=1",
]
PLAIN = ["init=copy_only", "recovery=none"]
OTHERS = ("run_positions", "run_corpus", "run_generation")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in `run`, its cache, its text and its corpus; not to change."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "texts").mkdir()
    for i in range(12):
        words = f"document {i}: " + f"some words of its own, {i} of them. " * 60
        (folder / "texts" / f"{i}.txt").write_text(words)
    (folder / "corpus.txt").write_text("It is another text altogether. " * 20)
    go(folder / "run", *texts_of(folder), *MEASURES, *PLAIN)
    return folder


@pytest.fixture
def copied(measured: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(measured, tmp_path / "copy")
    return tmp_path / "copy"


def texts_of(folder: Path) -> list[str]:
    return [
        "data=files",
        f"data.path=[{folder}/texts/*.txt]",
        f"eval.corpus.path={folder}/corpus.txt",
    ]


def table(folder: Path, model: str) -> dict[tuple[Any, ...], Any]:
    """The results of a model in a run folder, without times."""
    found = read_results(folder / "results.csv")[model]
    return {
        (r.measure, r.task, r.metric, r.context, r.position): (r.value, r.stderr, r.samples)
        for r in found
        if not r.metric.endswith("per_second")
    }


def broken(*args: Any) -> Any:
    raise AssertionError("measured again")


def test_every_measure_is_in_the_long_table(measured: Path) -> None:
    metrics = json.loads((measured / "run" / "metrics.json").read_text())
    results = read_results(measured / "run" / "results.csv")
    assert list(results) == ["teacher", "copy_only", "student"]
    for model in ("teacher", "student"):
        assert {r.measure for r in results[model]} == {
            "perplexity",
            "positions",
            "corpus",
            "generation",
        }
        place = ("perplexity", "held_out", "perplexity", 64, None)
        assert table(measured / "run", model)[place][0] == metrics[f"{model}/perplexity"]
    assert {r.measure for r in results["copy_only"]} == {"perplexity"}
    # Here copy_only is the student.
    own, same = table(measured / "run", "student"), table(measured / "run", "copy_only")
    assert all(own[place] == value for place, value in same.items())
    artifacts = json.loads((measured / "run" / "artifacts.json").read_text())
    assert {"evaluation of teacher, positions", "evaluation of teacher, corpus"} <= set(artifacts)
    assert any(name.startswith("evaluate/generation-") for name in artifacts)
    assert not any("generation" in name for name in artifacts if name.startswith("evaluation"))
    curves = (measured / "run" / "curves" / "metrics.csv").read_text()
    assert "student/positions/held_out/nll_by_position@128" in curves
    assert "teacher/generation/one_sequence/cache_bytes@32" in curves


def test_settings_of_one_measure_redo_no_other(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the same folder: what is asked besides changes nothing of the run."""
    before = table(copied / "run", "student")
    for name in ("run_corpus", "run_generation", "perplexity", "align_layer", "write_tokens"):
        monkeypatch.setattr(tc.pipeline, name, broken)
    options = [*texts_of(measured_of(copied)), *MEASURES, *PLAIN]
    go(copied / "run", *options, "eval.positions.width=50")
    after = table(copied / "run", "student")
    changed = {place[0] for place in {*before, *after} if before.get(place) != after.get(place)}
    assert changed == {"positions"}
    assert [p[4] for p in after if p[0] == "positions" and p[4]] == [1, 51, 101]
    assert len(list((copied / "run" / "evaluate").glob("positions-*"))) == 2
    # And back: both are still there.
    monkeypatch.setattr(tc.pipeline, "run_positions", broken)
    go(copied / "run", *options)
    assert table(copied / "run", "student") == before


def measured_of(copied: Path) -> Path:
    """Where the text of a copied run was: its path is part of what made the run."""
    record = json.loads((copied / "run" / "science.json").read_text())
    return Path(record["data.path"][0]).parents[1]


def test_positions_are_measured_on_the_evaluation_part_alone(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real = [], tc.pipeline.run_positions

    def noting(model: Any, tokenizer: Any, documents: list[Document], *rest: Any) -> list[Result]:
        read.append({document.sha256[:16] for document in documents})
        return real(model, tokenizer, documents, *rest)

    monkeypatch.setattr(tc.pipeline, "run_positions", noting)
    alone(measured, tmp_path / "alone", f"student.path={measured}/run/student")
    record = json.loads((measured / "run" / "data" / "splits.json").read_text())
    assert read == [set(record["parts"]["evaluation"]["hashes"])]  # the teacher's was there


def test_a_killed_evaluation_goes_on(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = table(copied / "run", "student")
    for gone in [*(copied / "run" / "evaluate").iterdir(), copied / "run" / "results.csv"]:
        (shutil.rmtree if gone.is_dir() else Path.unlink)(gone)
    shutil.rmtree(copied / "cache" / "evaluations")
    real, seen = tc.pipeline.run_positions, []

    def dies_at_second(model: Any, *args: Any) -> Any:
        seen.append(model)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(model, *args)

    monkeypatch.setattr(tc.pipeline, "run_positions", dies_at_second)
    options = [*texts_of(measured_of(copied)), *MEASURES, *PLAIN]
    with pytest.raises(KeyboardInterrupt):
        go(copied / "run", *options)
    assert list(read_results(copied / "run" / "results.csv")) == ["teacher", "copy_only", "student"]
    monkeypatch.setattr(tc.pipeline, "perplexity", broken)
    go(copied / "run", *options)
    assert len(seen) == 3  # the teacher's was there
    assert table(copied / "run", "student") == before


def alone(folder: Path, run_dir: Path, *overrides: str) -> dict[str, Any]:
    """Measures a saved model of `folder` as a user would."""
    places = [f"run_dir={run_dir}", f"paths.cache_dir={folder}/cache", *texts_of(folder)]
    run(composed(*SMOKE, "stages=[evaluate]", *places, *MEASURES, *overrides))
    return json.loads((run_dir / "metrics.json").read_text())


def test_a_saved_student_is_measured_as_in_its_run(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("calibrate", "initialise", "fresh_mixer", "write_training", "run_stage"):
        monkeypatch.setattr(tc.pipeline, name, broken)
    metrics = alone(measured, tmp_path / "alone", f"student.path={measured}/run/student")
    assert table(tmp_path / "alone", "student") == table(measured / "run", "student")
    assert table(tmp_path / "alone", "teacher") == table(measured / "run", "teacher")
    assert metrics["evaluate_teacher/reused"] and metrics["evaluate_teacher_positions/reused"]
    assert not metrics["evaluate_student_positions/reused"]
    assert "copy_only/perplexity" not in metrics
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert not names & {"init", "align", "blocks", "recover", "student"}
    for name in ("perplexity", *OTHERS):
        monkeypatch.setattr(tc.pipeline, name, broken)
    alone(measured, tmp_path / "alone", f"student.path={measured}/run/student")


def test_another_model_in_the_folder_is_told_apart(copied: Path, tmp_path: Path) -> None:
    given = [f"student.path={copied}/run/student", "eval.measures=[generation]"]
    metrics = alone(copied, tmp_path / "alone", *given)
    assert "data/seconds" not in metrics  # generation reads no text of the run
    weights = next((copied / "run" / "student").glob("*.safetensors"))
    tensors = load_tensors(weights)
    tensors["model.norm.weight"] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(TCError, match="student: "):
        alone(copied, tmp_path / "alone", *given)
    alone(copied, tmp_path / "alone", given[0], "eval.measures=[positions]")
    assert {key[0] for key in table(tmp_path / "alone", "student")} == {"positions"}


def test_metrics_of_another_model_do_not_stay(copied: Path, tmp_path: Path) -> None:
    given = f"student.path={copied}/run/student"
    metrics = alone(copied, tmp_path / "alone", given, "eval.measures=[perplexity]")
    assert "student/perplexity" in metrics and "student/nll" in metrics
    weights = next((copied / "run" / "student").glob("*.safetensors"))
    tensors = load_tensors(weights)
    tensors["model.norm.weight"] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    metrics = alone(copied, tmp_path / "alone", given, "eval.measures=[positions]")
    assert "teacher/perplexity" in metrics
    assert not [n for n in metrics if n.startswith(("student/perplexity", "student/nll"))]


def test_a_plain_teacher_can_be_the_model(measured: Path, tmp_path: Path) -> None:
    teacher = load_teacher(group("teacher", "random_llama"), tmp_path)
    for saving in (teacher.model, teacher.tokenizer):
        saving.save_pretrained(tmp_path / "model")
    alone(measured, tmp_path / "alone", f"student.path={tmp_path}/model")
    found = table(tmp_path / "alone", "student")
    assert found == table(tmp_path / "alone", "teacher")


def test_another_tokenizer_is_refused_before_anything_is_measured(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tc.pipeline, "write_tokens", broken)
    with pytest.raises(TCError, match="its tokenizer is not the teacher's"):
        alone(
            measured,
            tmp_path / "alone",
            f"student.path={measured}/run/student",
            "teacher=tiny_llama",
        )


def test_a_corpus_that_cannot_be_had_stops_the_run_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: Any, **options: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    monkeypatch.setattr(tc.pipeline, "load_teacher", None)
    with pytest.raises(TCError, match=r"no network\n.*eval.corpus.path="):
        go(tmp_path / "run", "eval=wikitext2")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("place", "times"), [("cache", 1), ("run", 2)])  # the second: the control
def test_what_runs_share_is_made_by_one_of_them(place: str, times: int, tmp_path: Path) -> None:
    folder, made, begun = tmp_path / place / "things" / "one", [], threading.Barrier(2)

    def one(number: int) -> bool:
        pipeline = Pipeline.__new__(Pipeline)
        pipeline.cache, pipeline._known = tmp_path / "cache", {}

        def make(fresh: Path) -> dict:
            made.append(number)
            (fresh / "number").write_text("the same")
            time.sleep(0.5 + number / 2)
            return {}

        begun.wait()
        return pipeline._artifact(folder, Manifest("thing", {"key": 1}), make)[1]

    with ThreadPoolExecutor(2) as pool:
        reused = list(pool.map(one, range(2)))
    assert len(made) == times
    assert sum(reused) == 2 - times
    assert find(folder, Manifest("thing", {"key": 1})) is not None
