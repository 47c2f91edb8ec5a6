"""Folders that are given to be measured: what is one, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from student_helpers import logits, student, teacher, tokens
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from tc.errors import TCError
from tc.student.saved import check_saved, folder_problem, load_saved
from tc.teacher.untrained import byte_tokenizer

TOKENIZER = byte_tokenizer()


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("which", ["student", "teacher"])
def test_a_student_and_a_teacher_load_as_they_were(which: str, tmp_path: Path) -> None:
    model = student("qwen3", "odd") if which == "student" else teacher("qwen3")
    path = saved(model, tmp_path / "model")
    assert folder_problem(path) is None
    check_saved(path, TOKENIZER)
    loaded, ids = load_saved(path, torch.float32), tokens(20)[0]
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_computed_in_the_teachers_type(dtype: torch.dtype, tmp_path: Path) -> None:
    path = saved(student("llama", "odd").to(torch.bfloat16), tmp_path / "model")
    loaded = load_saved(path, dtype)
    assert loaded.dtype == dtype
    assert loaded.mixers[1].A_log.dtype == torch.float32  # in either


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    assert "is no folder" in str(folder_problem(str(tmp_path / "none")))
    assert "has no config.json; give one" in str(folder_problem(str(tmp_path)))
    path = Path(saved(student("llama"), tmp_path / "student"))
    assert f"did you mean {path}?" in str(folder_problem(str(tmp_path)))
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    (path / "tokenizer.json").unlink()
    problem = str(folder_problem(str(path)))
    assert "truncated" in problem and "there is no tokenizer" in problem and "\n" not in problem


def test_another_tokenizer_is_told_before_weights_are_read(tmp_path: Path) -> None:
    path = Path(saved(student("llama"), tmp_path / "student"))
    (path / "model.safetensors").unlink()
    other = byte_tokenizer()
    other.add_tokens(["speech"])
    with pytest.raises(TCError, match="its tokenizer is not the teacher's"):
        check_saved(str(path), other)
    other = byte_tokenizer()
    other.backend_tokenizer.pre_tokenizer = None  # the same vocabulary, other cuts
    with pytest.raises(TCError, match="its tokenizer is not the teacher's"):
        check_saved(str(path), other)
    check_saved(str(path), TOKENIZER)


def test_another_architecture_is_told_with_all_else(tmp_path: Path) -> None:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 300, "n_positions": 16}
    path = saved(GPT2LMHeadModel(GPT2Config(**sizes)), tmp_path / "gpt")
    other = byte_tokenizer()
    other.add_tokens(["speech"])
    with pytest.raises(TCError, match="it is a gpt2; a student, or one of these") as error:
        check_saved(path, other)
    assert "its tokenizer is not the teacher's" in str(error.value)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = Path(saved(teacher("llama"), tmp_path / "model"))
    config = path / "config.json"
    config.write_text(
        config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4')
    )
    with pytest.raises(TCError, match=r"do not fit their config.json:\n  - model.layers.3"):
        load_saved(str(path), torch.float32)
    config.write_text("{")
    with pytest.raises(TCError, match="cannot be loaded"):
        check_saved(str(path), TOKENIZER)
