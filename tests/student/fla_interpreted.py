"""Runs the comparisons of `fla_cases.py` on a CPU, under Triton's interpreter; prints JSON.

What is stubbed: autotuning (the first configuration that a kernel lists is taken), and `range` in
FLA's modules, whose loop variables the interpreter would hand to the kernels as plain ints without
`.to`. Nothing of the arithmetic is replaced.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Iterator

os.environ |= {"TRITON_INTERPRET": "1", "FLA_CACHE_RESULTS": "0"}

import fla.layers  # noqa: F401 - its modules must be there to be stubbed
import torch
from triton.runtime.autotuner import Autotuner


class Index(int):
    """A loop variable that can be cast, as a compiled kernel's can."""

    def to(self, *args: object, **kwargs: object) -> Index:
        return self


def index_range(*bounds: int) -> Iterator[Index]:
    return map(Index, builtins.range(*map(int, bounds)))


def stub() -> None:
    Autotuner._bench = lambda self, *args, **kwargs: [0.0, 0.0, 0.0]
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            module.__dict__["range"] = index_range


def main() -> None:
    import fla_cases as cases

    torch.set_num_threads(1)
    found = {"naive": cases.naive_errors(), "steps": cases.step_errors("cpu")}
    for case in ("plain", "padding", "documents", "both"):
        found[f"op {case}"] = cases.op_errors(case, "cpu")
    for gate in (True, False):
        found[f"eval {gate}"] = cases.mixer_eval_errors(gate, "cpu")
        found[f"train {gate}"] = cases.mixer_train_errors(gate, "cpu")
    print(json.dumps(found))


if __name__ == "__main__":
    stub()
    main()
