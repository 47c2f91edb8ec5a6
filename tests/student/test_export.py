"""Exported students: the same model without this package, or a message that says why not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composing import composed
from export_helpers import FLA, save_student
from op_cases import rel_rms
from safetensors.torch import load_file
from student_helpers import ARCHITECTURES, logits, padded, tokens
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import tc.student.export as exporting
from tc.errors import TCError
from tc.pipeline import run
from tc.student.card import LICENCES, model_card
from tc.student.export import export, main, modelling_source
from tc.student.fla_form import fla_name, fla_problems

LOADER = """
import sys
sys.modules["tc"] = None  # importing it fails from here on
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
torch.manual_seed(99)
root = Path(sys.argv[1])
given, found = load_file(root / "given.safetensors"), {}
for folder in sorted(root.glob("*.remote")):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    assert not any(info.values()), info
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    if folder.stem == "llama":
        model.save_pretrained(root / "again")
        model = AutoModelForCausalLM.from_pretrained(root / "again", trust_remote_code=True)
        try:
            AutoModel.from_config(model.config)
        except ValueError:
            found["refused"] = torch.ones(1)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        assert tokenizer("a b").input_ids == [97, 32, 98]
    pads = {"attention_mask": given["mask"]}
    greedy = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with torch.no_grad():
        found[folder.stem] = model(given["ids"]).logits
        found[folder.stem + ".padded"] = model(given["padded"], **pads).logits
        found[folder.stem + ".generated"] = model.generate(given["padded"], **pads, **greedy)
save_file(found, root / "found.safetensors")
assert "fla" not in sys.modules
"""
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
IDS = tokens(50)[0]
PADDED, MASK = padded(tokens(9, 33, seed=1), "left")
each = pytest.mark.parametrize("architecture", ARCHITECTURES)
interpreted = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(find_spec(name) for name in ("fla", "triton")),
        reason="needs flash-linear-attention and triton",
    ),
]


@pytest.fixture
def student(tmp_path: Path) -> Path:
    """The folder of a Llama student that FLA's classes can say."""
    save_student(tmp_path / "student", student=FLA)
    return tmp_path / "student"


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | fields))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- one modelling file --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, PreTrainedModel]]:
    """A student of every architecture, exported beside its own folder."""
    root, made = tmp_path_factory.mktemp("students"), {}
    for name in ARCHITECTURES:
        shards = "50KB" if name == "qwen3" else "50GB"
        made[name] = save_student(root / name, name, shards=shards)
        export(root / name, root / f"{name}.remote", "remote")
    return root, made


@pytest.fixture(scope="module")
def elsewhere(students, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What a process gets of the exported folders that cannot import this package."""
    from safetensors.torch import save_file

    root, _ = students
    save_file({"ids": IDS, "padded": PADDED, "mask": MASK}, root / "given.safetensors")
    place = tmp_path_factory.mktemp("elsewhere")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(place)}
    result = subprocess.run(
        [sys.executable, "-c", LOADER, str(root)],
        capture_output=True,
        text=True,
        env=env,
        cwd=place,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return load_file(root / "found.safetensors")


@each
def test_remote_code_gives_the_same_logits(architecture, students, elsewhere) -> None:
    model = students[1][architecture]
    assert rel_rms(elsewhere[architecture], logits(model, IDS)) < 1e-5
    truth = logits(model, PADDED, attention_mask=MASK)
    real = MASK.bool()
    assert rel_rms(elsewhere[f"{architecture}.padded"][real], truth[real]) < 1e-5
    with torch.no_grad():
        control = next(iter(model.mixers.values()))
        kept = control.A_log.clone()
        control.A_log.add_(2)
        assert rel_rms(elsewhere[architecture], logits(model, IDS)) > 1e-4
        control.A_log.copy_(kept)


@each
def test_remote_code_generates_the_same(architecture, students, elsewhere) -> None:
    model = students[1][architecture]
    seen = model.generate(PADDED, attention_mask=MASK, **GREEDY)
    assert torch.equal(elsewhere[f"{architecture}.generated"], seen)


def test_servers_that_bring_their_own_cache_are_refused(students, elsewhere) -> None:
    """Else they would run the mixers without their states."""
    assert elsewhere["refused"].all()
    assert not students[1]["llama"].is_backend_compatible()
    with pytest.raises(ValueError):
        AutoModel.from_config(students[1]["llama"].config)


def test_with_the_package_no_code_of_the_folder_is_run(students) -> None:
    root, made = students
    model = AutoModelForCausalLM.from_pretrained(root / "llama.remote")
    assert type(model) is type(made["llama"])
    assert torch.equal(logits(model, IDS), logits(made["llama"], IDS))


def test_remote_folder(students) -> None:
    root, _ = students
    same = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    made = {"README.md", "config.json", "model.safetensors", "modeling_gdn_hybrid.py"}
    assert set(names_in(root / "llama.remote")) == same | made
    for name in same | {"model.safetensors"}:
        path = root / "llama" / name
        assert (root / "llama.remote" / name).read_bytes() == path.read_bytes()
    assert "model.safetensors.index.json" in names_in(root / "qwen3.remote")
    added = dict(config_of(root / "llama.remote"))
    auto_map = added.pop("auto_map")
    assert added == config_of(root / "llama")
    assert auto_map["AutoModelForCausalLM"] == "modeling_gdn_hybrid.GDNHybridLlamaForCausalLM"
    assert export(root / "llama.remote", root / "once_more", "remote")
    assert config_of(root / "once_more") == config_of(root / "llama.remote")


def test_modelling_file_is_tidy(students) -> None:
    root, _ = students
    text = (root / "mixtral.remote" / "modeling_gdn_hybrid.py").read_text()
    assert text == modelling_source(config_of(root / "mixtral"))
    assert max(map(len, text.splitlines())) <= 100
    assert "student of small" in text
    assert "from transformers import MixtralConfig, MixtralForCausalLM\n" in text


def test_a_forced_back_end_is_not_exported(student: Path, tmp_path: Path) -> None:
    gdn = config_of(student)["gdn"]
    gdn["form"]["backend"] = "fla"
    change_config(student, gdn=gdn)
    export(student, tmp_path / "out", "remote")
    assert config_of(tmp_path / "out")["gdn"]["form"]["backend"] == "auto"


# ---- FLA's own model -----------------------------------------------------------------------------

SAID = {
    "llama": {},
    "qwen2": {"architecture": "qwen2", "tie_word_embeddings": True, "shards": "50KB"},
    "qwen3": {"architecture": "qwen3", "layers": (0, 1, 2), "head_dim": 32},
    "no_gate": {"architecture": "mistral", "student": {"use_gate": False}},
}
"""Students that FLA's classes can say: what `save_student` is given."""


@pytest.fixture(scope="module")
def as_fla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fla")
    for name, fields in SAID.items():
        form = FLA | fields.get("student", {})
        save_student(root / name, **{**fields, "student": form})
        export(root / name, root / f"{name}.fla", "fla")
    return root


@pytest.fixture(scope="module")
def as_fla_found(as_fla: Path) -> dict[str, Any]:
    """What FLA's own class makes of them, in a process of its own: there Triton is interpreted."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parents[1]), str(here.parent), str(here)])
    result = subprocess.run(
        [sys.executable, str(here / "fla_export_interpreted.py"), str(as_fla)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        timeout=290,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [pytest.param(name, marks=interpreted) for name in SAID])
def test_flas_class_is_the_student(name: str, as_fla_found: dict[str, Any]) -> None:
    found = as_fla_found[name]
    assert found["class"].startswith("fla.models.gated_deltanet.")
    assert not any(found["report"].values()), found["report"]
    assert found["parameters"][0] == found["parameters"][1]
    assert found["recurrent"] < 1e-5
    assert found["control"] > 1e-3
    if name == "llama":
        assert found["chunk"] < 1e-5
        assert found["step"] < 1e-5
        assert found["generated"][0] == found["generated"][1]


@pytest.mark.parametrize("name", SAID)
def test_fla_tensors_are_the_students(name: str, as_fla: Path) -> None:
    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        paths = folder.glob("*.safetensors")
        return {key: value for path in paths for key, value in load_file(path).items()}

    ours, theirs = tensors(as_fla / name), tensors(as_fla / f"{name}.fla")
    assert len(ours) == len(theirs)
    assert all(torch.equal(value, theirs[fla_name(key)]) for key, value in ours.items())
    assert {"model.embeddings.weight", "model.layers.0.attn.A_log"} <= set(theirs)
    assert {"model.layers.1.attn_norm.weight", "model.layers.1.mlp_norm.weight"} <= set(theirs)
    index = as_fla / f"{name}.fla" / "model.safetensors.index.json"
    assert index.is_file() == (name == "qwen2")
    if index.is_file():
        assert set(json.loads(index.read_text())["weight_map"]) == set(theirs)


def test_fla_config(as_fla: Path) -> None:
    config = config_of(as_fla / "qwen2.fla")
    expected = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True}
    assert config["attn"] == expected | {"rope_theta": 10000.0, "window_size": None}
    assert config["tie_word_embeddings"] is True
    assert config["norm_eps"] == 1e-6
    assert config_of(as_fla / "qwen3.fla")["attn"] is None
    assert config_of(as_fla / "no_gate.fla")["use_gate"] is False
    assert not (as_fla / "llama.fla" / "modeling_gdn_hybrid.py").exists()
    generation = json.loads((as_fla / "llama.fla" / "generation_config.json").read_text())
    assert generation["use_cache"] is False


NOT_SAID = [
    ({"architecture": "qwen2_moe"}, ["feed-forward layers are those of qwen2_moe"]),
    (
        {"architecture": "arcee", "rms_norm_eps": 1e-6},
        ["those of arcee", "have relu2; FLA's have silu"],
    ),
    ({"mlp_bias": True}, ["have biases \\(mlp_bias\\)"]),
    ({"architecture": "qwen2", "student": {"norm_eps": 1e-6}}, ["teacher's biases; .*student=fla"]),
    (
        {"student": {"norm_eps": 1e-5}},
        ["1e-05 and that of its blocks 1e-06.*student.norm_eps=1e-06"],
    ),
    ({"attention_bias": True}, ["bias on o_proj"]),
    ({"head_dim": 32}, ["heads are 128 channels wide together.*hidden_size, 64"]),
    ({"architecture": "qwen3", "head_dim": 16}, ["kept layers have q and k norms"]),
    (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        ["rotary frequencies are scaled: linear \\(factor\\)"],
    ),
    (
        {"architecture": "qwen3", "student": {}, "head_dim": 32},
        ["teacher's q and k norms", "norm_eps", "kept layers have q and k norms", "heads are 128"],
    ),
]


@pytest.mark.parametrize(("fields", "says"), NOT_SAID)
def test_what_fla_cannot_say_is_refused_by_name(fields, says, tmp_path: Path) -> None:
    made = save_student(tmp_path / "student", **{"student": FLA, **fields})
    with pytest.raises(TCError) as error:
        export(tmp_path / "student", tmp_path / "out", "fla")
    lines = str(error.value).splitlines()
    assert "take --format remote" in lines[0]
    assert len(lines) == 1 + len(says)
    for pattern, line in zip(says, lines[1:], strict=True):
        assert re.search(pattern, line), line
    assert not (tmp_path / "out").exists()
    assert fla_problems(made.config) == [line.removeprefix("  - ") for line in lines[1:]]


def test_without_kept_layers_rotary_positions_do_not_matter(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    made = save_student(tmp_path, layers=(0, 1, 2), student=FLA, rope_parameters=rope)
    assert fla_problems(made.config) == []


# ---- refusals and failures -----------------------------------------------------------------------


def spoil_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json; give the folder of a saved"),
        (lambda f: change_config(f, model_type="llama"), "no student: its model_type is llama"),
        (lambda f: change_config(f, model_type="gdn_hybrid_bert"), "Allowed: gdn_hybrid_arcee"),
        (lambda f: (f / "config.json").write_text("[]"), "no student: its model_type is not given"),
        (lambda f: change_config(f, gdn=None), "its gdn must have layers, form and provenance"),
        (lambda f: change_config(f, gdn={"layers": [0]}), "must have layers, form and provenance"),
        (spoil_weights, "model.safetensors .* is truncated or damaged"),
        (lambda f: (f / "tokenizer.json").unlink(), "there is no tokenizer"),
    ],
)
def test_what_is_no_whole_student_is_refused(spoil, says, student, tmp_path, capsys) -> None:
    spoil(student)
    given = [str(student), str(tmp_path / "out"), "--format", "remote"]
    assert main(given) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert message.startswith("error: ")
    assert re.search(says, message), message
    assert names_in(tmp_path) == ["student"]


def test_a_missing_folder_and_an_existing_output_are_named(student: Path, tmp_path: Path) -> None:
    with pytest.raises(TCError, match="nowhere does not exist; give the folder"):
        export(tmp_path / "nowhere", tmp_path / "out", "remote")
    (tmp_path / "out").mkdir()
    with pytest.raises(TCError, match="out exists; give a folder that does not"):
        export(student, tmp_path / "out", "remote")
    (tmp_path / "file").touch()
    with pytest.raises(TCError, match="file is a file"):
        export(student, tmp_path / "file" / "deep" / "out", "remote", dry_run=True)
    with pytest.raises(TCError, match="lies in the student's own folder"):
        export(student, student / "out", "remote", dry_run=True)


def test_a_dry_run_checks_and_writes_nothing(student: Path, tmp_path: Path, capsys) -> None:
    given = [str(student), str(tmp_path / "out"), "--format", "fla", "--dry-run"]
    assert main(given) == 0
    assert "would write" in capsys.readouterr().out
    assert names_in(tmp_path) == ["student"]
    change_config(student, mlp_bias=True)
    assert main(given) == 1


def test_too_little_room_is_seen_before(student, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(TCError, match=r"the export needs .* Free some space or choose another one"):
        export(student, tmp_path / "out", "remote")
    assert names_in(tmp_path) == ["student"]


def test_an_export_that_fails_leaves_nothing(student, tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "model_card", fail)
    with pytest.raises(TCError, match="no space left on the device"):
        export(student, tmp_path / "out", "remote")
    assert names_in(tmp_path) == ["student"]


# ---- the card ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    root = tmp_path_factory.mktemp("run")
    places = [f"run_dir={root / 'run'}", f"paths.cache_dir={root / 'cache'}"]
    run(composed("experiment=smoke", "trainer=cpu", "recovery=none", *places))
    return root / "run"


def test_the_card_of_a_run_has_its_numbers(finished: Path, tmp_path: Path) -> None:
    export(finished / "student", tmp_path / "out", "remote")
    assert "manifest.json" not in names_in(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    metrics = json.loads((finished / "metrics.json").read_text())
    assert f"| student | {metrics['student/perplexity']:,.2f} |" in card
    assert f"Perplexity on {metrics['evaluation_tokens']:,} held-out tokens" in card
    provenance = config_of(tmp_path / "out")["gdn"]["provenance"]
    for row in (
        f"| teacher | {provenance['teacher_name']} |",
        f"| policy | {provenance['policy']} |",
        f"| calibration tokens | {metrics['calibration_tokens']} |",
        "| seed | 0 |",
        "| made by | taylor-calibrate ",
    ):
        assert row in card, row
    for word in ("vLLM", "SGLang", "As of 2026", "trust_remote_code=True", "2606.16429"):
        assert word in card


def test_results_of_the_long_table_are_shown(finished: Path, tmp_path: Path, monkeypatch) -> None:
    for name in ("science.json", "metrics.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    (tmp_path / "results.csv").write_text(
        "model,measure,task,metric,value,stderr,position\nstudent,tasks,boolq,acc,0.6123456,0.02,\n"
    )
    export(finished / "student", tmp_path / "out", "remote", tmp_path)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| model | measure | task | metric | value | stderr |" in card
    assert "| student | tasks | boolq | acc | 0.6123 | 0.02 |" in card


def test_results_of_another_run_are_refused(finished: Path, tmp_path: Path) -> None:
    science = json.loads((finished / "science.json").read_text())
    (tmp_path / "science.json").write_text(json.dumps(science | {"seed": 7}))
    with pytest.raises(TCError, match=r"has no metrics.json; --results wants"):
        export(finished / "student", tmp_path / "out", "remote", tmp_path)
    (tmp_path / "metrics.json").write_text("{}")
    with pytest.raises(TCError, match=r"(?s)not the run that made this student.*seed: 7 -> 0"):
        export(finished / "student", tmp_path / "out", "remote", tmp_path)


def test_a_damaged_student_of_a_run_is_named(finished: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(finished / "student", tmp_path / "student")
    path = tmp_path / "student" / "tokenizer_config.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(TCError, match=r"tokenizer_config.json has \d+ bytes, not"):
        export(tmp_path / "student", tmp_path / "out", "remote")


@pytest.mark.parametrize(
    ("converted", "sentence"),
    [
        ([], "All 3 layers keep the teacher's softmax attention."),
        ([1], "Of 3 layers 2 keep .* attention; the other one is a Gated DeltaNet mixer with a"),
        ([0, 2], "Of 3 layers 1 keeps .* attention; the other 2 are Gated DeltaNet mixers, each"),
        ([0, 1, 2], "All 3 layers are Gated DeltaNet mixers, each with a state of constant size."),
    ],
)
def test_the_card_says_how_many_layers_of_which_kind(
    converted: list[int], sentence: str, student
) -> None:
    config = config_of(student)
    config["num_hidden_layers"], config["gdn"]["layers"] = 3, converted
    assert re.search(sentence, model_card(config, "remote", "0.1.0", None))


@pytest.mark.parametrize(
    ("hub", "lines"),
    [
        ("Qwen/Qwen3-8B", ["base_model: Qwen/Qwen3-8B", "license: apache-2.0"]),
        ("Qwen/Qwen2.5-3B", ["license: other", "license_name: qwen-research"]),
        ("some/model", ["base_model: some/model"]),
    ],
)
def test_the_licence_is_the_teachers_or_not_claimed(hub: str, lines: list[str], student) -> None:
    config = config_of(student)
    config["gdn"]["provenance"] |= {"teacher": {"hub": hub, "commit": "c0ffee"}}
    card = model_card(config, "fla", "0.1.0", None)
    front = card.split("---")[1].splitlines()
    assert set(lines) <= set(front)
    assert any(line.startswith("license") for line in front) == (hub in LICENCES)
    assert ("look it up" in card) == (hub not in LICENCES)
    assert "| revision | c0ffee |" in card
    assert "None were given" in card
