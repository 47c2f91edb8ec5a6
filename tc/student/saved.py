"""A saved model that is only to be measured: a student, or any other of its teacher's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tc.data.tokens import prefix_ids
from tc.errors import TCError, one_message
from tc.teacher.pretrained import check_loaded, check_weights, unreadable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""From this folder alone, and no code of it."""

SAMPLE = "My fellow Americans, 1,234 things\n\n  cost \u20ac5."
"""Tokenizers with one vocabulary may still cut text in other ways."""


def folder_problem(path: str) -> str | None:
    """What keeps a folder from being loaded as a model, as far as names and headers tell."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is no folder"
        inside = folder / "student"
        is_run = (inside / "config.json").is_file()
        hint = f"did you mean {inside}?" if is_run else "give one that save_pretrained wrote"
        return f"student.path={path} {what}; {hint}"
    try:
        check_weights(folder)
    except TCError as error:
        return f"student.path={path}: {' '.join(str(error).split())}"
    return None


def check_saved(path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks what a folder holds, before its weights are read.

    Args:
        path: a folder that `save_pretrained` wrote.
        tokenizer: the teacher's, which must be the folder's too.

    Raises:
        TCError: if it is no model of a supported architecture, or has another tokenizer.
    """
    from transformers import AutoConfig, AutoTokenizer

    from tc.student.hybrid import PREFIX
    from tc.teacher.convertible import SUPPORTED

    folder = Path(path).expanduser()
    with _loading(path):
        kind = AutoConfig.from_pretrained(folder, **LOCAL).model_type
        own = AutoTokenizer.from_pretrained(folder, **LOCAL)
    problems = []
    if kind.removeprefix(PREFIX) not in SUPPORTED:
        allowed = ", ".join(sorted(SUPPORTED))
        problems.append(f"it is a {kind}; a student, or one of these is allowed: {allowed}")
    if not _same(own, tokenizer):
        problems.append(
            "its tokenizer is not the teacher's, so the two cannot be measured on the same "
            "tokens; give the teacher that it was made from, teacher=..., or the model itself: "
            "teacher=hf teacher.path=..."
        )
    if problems:
        raise one_message(problems, f"student.path={path} cannot be measured:")


def load_saved(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Loads a folder that `check_saved` has approved, on the CPU and in evaluation mode.

    Args:
        path: the folder.
        dtype: the teacher's, whatever was saved: what is compared is computed alike.

    Raises:
        TCError: naming missing, unexpected and wrongly shaped tensors, or what else keeps it from
            being loaded.
    """
    from transformers import AutoModelForCausalLM

    import tc.student.hybrid  # noqa: F401 - registers the students' classes

    with _loading(path):
        model, report = AutoModelForCausalLM.from_pretrained(
            Path(path).expanduser(),
            **LOCAL,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    check_loaded(path, report)
    return model.eval().requires_grad_(False)


@contextmanager
def _loading(path: str) -> Iterator[None]:
    """Turns what transformers raises to one message."""
    try:
        yield
    except Exception as error:  # of other packages' readers, as in `loading_errors`
        raise TCError(unreadable(f"student.path={path}", error)) from error


def _same(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    return (
        one.get_vocab() == other.get_vocab()
        and one(SAMPLE)["input_ids"] == other(SAMPLE)["input_ids"]
        and prefix_ids(one).tolist() == prefix_ids(other).tolist()
    )
