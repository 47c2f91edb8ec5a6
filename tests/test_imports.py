"""The package where there is no Triton, no FLA and no other kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from composing import ROOT

KERNELS = ("triton", "fla", "flash_attn", "causal_conv1d")
PROGRAM = """
import importlib, importlib.util, importlib.abc, pkgutil, sys

absent = set(sys.argv[1].split(","))

class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] in absent else found(name, package)
)
import tc
for module in pkgutil.walk_packages(tc.__path__, "tc."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import torch
from tc.student.mixer import GatedDeltaNet, MixerForm
y = GatedDeltaNet(8, 2, 4, 0, MixerForm())(torch.randn(2, 70, 8))[0]
y.sum().backward()
print("finite", bool(y.isfinite().all()))
"""


def without(*absent: str) -> subprocess.CompletedProcess:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(absent)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        timeout=200,
    )


@pytest.mark.slow
def test_every_module_imports_and_a_mixer_runs() -> None:
    done = without(*KERNELS)
    assert done.returncode == 0, done.stderr[-3000:]
    # Its last line: lm-eval says on import what it has tried to download.
    assert done.stdout.split()[-2:] == ["finite", "True"]


@pytest.mark.slow
def test_what_is_needed_would_be_missed() -> None:
    """A control: a package that no run can do without."""
    done = without("safetensors")
    assert done.returncode != 0 and "No module named 'safetensors" in done.stderr
