"""Times FLA's kernels against our chunked PyTorch on a CUDA GPU, and checks that they agree.

python experiments/speed/fla_gpu.py

Letters: T tokens, H heads. One sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from measuring import parse_arguments, show, write
from time_operator import PASSES, largest_difference, make_inputs, require_agreement

from tc.meter import median_seconds
from tc.student.ops import gated_delta_rule

LENGTHS = (512, 2048, 8192, 32768)
SHAPES = ((9, 64), (32, 128))
"""H and head dim: the embedded teacher's, and those of an 8B model."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOLERANCE = 0.1
"""Wide, for bfloat16: it tells another computation, not another rounding."""

RULES = {name: partial(gated_delta_rule, backend=name) for name in ("chunk", "fla")}
WARM_UP, REPEATS = 3, 20


def measure(T: int, H: int, head_dim: int, dtype: str, name: str) -> dict[str, Any]:
    """A row: one length, shape, dtype and pass."""
    inputs = make_inputs(T, H, head_dim, "cuda", DTYPES[dtype])

    def call(rule: str) -> tuple[torch.Tensor, ...]:
        results = PASSES[name](RULES[rule], inputs)
        torch.cuda.synchronize()
        return results

    difference = largest_difference(call("fla"), call("chunk"))
    require_agreement(difference, TOLERANCE)
    took = median_seconds({rule: partial(call, rule) for rule in RULES}, REPEATS, WARM_UP)
    return {
        "tokens": T,
        "heads": H,
        "head_dim": head_dim,
        "dtype": dtype,
        "pass": name,
        **{f"{rule}_ms": took[rule] * 1e3 for rule in RULES},
        "ratio": took["chunk"] / took["fla"],
        "difference": difference,
    }


def main() -> None:
    """Measures all rows, and writes them where it is told to."""
    arguments = parse_arguments(__doc__, LENGTHS)
    if not torch.cuda.is_available():
        raise SystemExit("fla_gpu.py: torch sees no CUDA device here, so nothing was timed.")
    print(torch.cuda.get_device_name())
    rows = [
        show(measure(T, H, head_dim, dtype, name))
        for H, head_dim in SHAPES
        for dtype in DTYPES
        for T in arguments.lengths
        for name in PASSES
    ]
    write(arguments.output, rows)


if __name__ == "__main__":
    main()
