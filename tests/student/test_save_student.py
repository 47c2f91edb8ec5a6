"""A saved student, loaded by `transformers` in another process after `import tc` alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_cases import rel_rms
from safetensors import safe_open
from safetensors.torch import load_file
from student_helpers import ARCHITECTURES, layers_of, logits, student, teacher, tokens
from transformers import AutoModelForCausalLM, PreTrainedModel

each = pytest.mark.parametrize("architecture", ARCHITECTURES)
LOADER = """
import sys
from pathlib import Path
import tc
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
torch.manual_seed(99)
ids = torch.tensor([[int(i) for i in sys.argv[2].split(",")]])
found = {}
for folder in sorted(p for p in Path(sys.argv[1]).iterdir() if p.is_dir()):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert not model.training and type(model).__name__.startswith("GDNHybrid")
    found[folder.name] = model(ids).logits.detach()
    found[folder.name + ".generated"] = model.generate(ids, max_new_tokens=4, do_sample=False)
save_file(found, Path(sys.argv[1]) / "found.safetensors")
assert "fla" not in sys.modules
"""
IDS = tokens(100)[0]


@pytest.fixture(scope="module")
def students() -> dict[str, PreTrainedModel]:
    return {name: student(name, "odd") for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def saved(students, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name, model in students.items():
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def elsewhere(saved: Path) -> dict[str, torch.Tensor]:
    """What another process gets of the saved students."""
    root = str(Path(__file__).parents[2])
    ids = ",".join(map(str, IDS[0].tolist()))
    result = subprocess.run(
        [sys.executable, "-c", LOADER, str(saved), ids],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return load_file(saved / "found.safetensors")


@each
def test_another_process_gets_the_same_logits(architecture, students, elsewhere) -> None:
    assert torch.equal(elsewhere[architecture], logits(students[architecture], IDS))


@each
def test_another_process_generates_the_same(architecture, students, elsewhere) -> None:
    seen = students[architecture].generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(elsewhere[f"{architecture}.generated"], seen)


@each
def test_files(architecture: str, saved: Path, students) -> None:
    """Weights are safetensors only, and nothing of the replaced attention is among them."""
    files = sorted(p.name for p in (saved / architecture).iterdir())
    assert files == ["config.json", "generation_config.json", "model.safetensors"]
    with safe_open(saved / architecture / "model.safetensors", "pt") as file:
        names = set(file.keys())
    for i in layers_of(architecture, "odd"):
        stem = f"model.layers.{i}.self_attn."
        here = {name.removeprefix(stem) for name in names if name.startswith(stem)}
        assert here == set(students[architecture].mixers[i].state_dict())
    assert ("lm_head.weight" in names) != teacher(architecture).config.tie_word_embeddings


def test_tied_embeddings_are_tied_again(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved / "llama")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_config_file(saved: Path) -> None:
    config = json.loads((saved / "llama" / "config.json").read_text())
    assert config["model_type"] == "gdn_hybrid_llama"
    assert config["architectures"] == ["GDNHybridLlamaForCausalLM"]
    assert config["rope_parameters"]["rope_type"] == "llama3"
    assert config["rope_parameters"]["factor"] == 8.0
    assert config["gdn"]["layers"] == [1]


def test_saved_again_is_the_same(saved: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(saved / "qwen3").save_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (saved / "qwen3" / name).read_bytes()


@pytest.mark.parametrize("form", [{"use_gate": False}, {"carry_bias": False, "norm_eps": 1e-3}])
def test_form_survives(form: dict, tmp_path: Path) -> None:
    made = student("qwen2", "all", **form)
    made.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.mixers[0].form == made.mixers[0].form
    assert torch.equal(logits(again, IDS), logits(made, IDS))


@each
def test_bfloat16_keeps_the_decay_in_float32(architecture: str, saved: Path, students) -> None:
    half = AutoModelForCausalLM.from_pretrained(saved / architecture, dtype=torch.bfloat16)
    wide = {n for n, p in half.named_parameters() if p.dtype == torch.float32}
    assert {n.rsplit(".")[-1] for n in wide} == {"A_log", "dt_bias"}
    assert len(wide) == 2 * len(half.mixers)
    for i, mixer in half.mixers.items():
        assert torch.equal(mixer.A_log, students[architecture].mixers[i].A_log)
    seen, truth = logits(half, IDS), logits(students[architecture], IDS)
    assert seen.dtype == torch.bfloat16 and seen.isfinite().all()
    # Rounded logits may choose other experts.
    experts = architecture.endswith("moe") or architecture == "mixtral"
    assert rel_rms(seen, truth) < (0.4 if experts else 0.06)
    cached = half.generate(IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert cached.shape == (1, 103)


def test_bfloat16_saved_again_keeps_both_types(saved: Path, tmp_path: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(saved / "qwen3", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    expected = half.state_dict()
    assert {k: x.dtype for k, x in again.items()} == {k: x.dtype for k, x in expected.items()}
    assert all(torch.equal(again[k], expected[k]) for k in expected)
