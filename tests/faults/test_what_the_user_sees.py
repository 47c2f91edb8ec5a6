"""`run.py` on a bad input: the message once, on standard error, and nothing of anybody else's."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
from composing import ROOT

CASES = [
    (["eval.stride=0"], "eval.stride=0: at least 1 is allowed"),
    (["seed=many"], "could not be converted to Integer"),
    (["nonsense=1"], "Could not override 'nonsense'"),
    (["teacher=nonsense"], "Could not find 'teacher/nonsense'"),
    (["data=files", "data.path=['it\\'s, [a] {b} \\${seed}\nnext']"], "it's, [a] {b} ${seed}"),
    (["teacher=hf", "teacher.path=./gone"], "gone does not exist"),
    (["teacher=gguf", "teacher.path=file"], "is not a GGUF file"),
    (["run_dir=file"], "is not the folder of a run"),
    (["student.path=."], "student.path=. has no config.json"),
    (["policy=layers", "policy.keep=[7]"], "layers 0 to 2"),
]


@pytest.mark.parametrize(("overrides", "word"), CASES)
def test_one_message(
    overrides: list[str],
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    for name in ("HYDRA_FULL_ERROR", "TC_FULL_ERROR"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.setattr(
        sys, "argv", ["run.py", "experiment=smoke", *overrides, "paths.cache_dir=cache"]
    )
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "run.py"), run_name="__main__")
    said = capfd.readouterr()
    assert end.value.code == 1
    assert said.err.count(word) == 1
    assert said.err.count("error: ") == 1
    for line in ("Traceback", "Error executing job", "HYDRA_FULL_ERROR"):
        assert line not in said.err + said.out
    assert os.listdir(tmp_path) == ["file"]
