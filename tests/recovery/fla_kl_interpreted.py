"""Runs FLA's fused KL divergence on a CPU, under Triton's interpreter, beside ours; prints JSON.

What is stubbed is what `tests/student/fla_interpreted.py` stubs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import fla_interpreted  # before Triton, whose interpreter it turns on
import torch
from op_cases import rel_rms

from tc.recovery.losses import distillation_loss, fla_kl

N, V = 5, 70
Inputs = dict[str, torch.Tensor]


def make(dtype: torch.dtype) -> Inputs:
    torch.manual_seed(0)
    shapes = {"student": (N, 16), "teacher": (N, 24)}
    shapes |= {"student_head": (V, 16), "teacher_head": (V, 24)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def results(
    loss_of: Callable[..., torch.Tensor], inputs: Inputs, factor: float
) -> dict[str, torch.Tensor]:
    """The loss, and the gradients of `factor` times the loss."""
    given = {n: x.clone().requires_grad_(n.startswith("student")) for n, x in inputs.items()}
    loss = loss_of(**given)
    (factor * loss).backward()
    return {"loss": loss, "student": given["student"].grad, "head": given["student_head"].grad}


def ours(rows: int = 2, **inputs: torch.Tensor) -> torch.Tensor:
    return distillation_loss(**inputs, rows=rows).total


def errors(dtype: torch.dtype, factor: float, loss_of: Callable[..., torch.Tensor]) -> dict:
    """Relative RMS errors against ours in float64 on the same inputs."""
    inputs = make(dtype)
    truth = results(ours, {n: x.double() for n, x in inputs.items()}, factor)
    found = results(loss_of, inputs, factor)
    return {name: rel_rms(found[name], truth[name]) for name in truth}


def reversed_kl(student, teacher, student_head, teacher_head) -> torch.Tensor:
    """A control: the KL divergence the other way round."""
    p, q = (x @ h.T for x, h in ((student, student_head), (teacher, teacher_head)))
    return torch.nn.functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="batchmean"
    )


def main() -> None:
    torch.set_num_threads(1)
    full = partial(errors, torch.float32)
    found = {
        "ours": full(1.0, ours),
        "fla": full(1.0, fla_kl),
        "fla scaled": full(3.0, fla_kl),
        "reversed": full(1.0, reversed_kl),
        "fla half": errors(torch.bfloat16, 1.0, fla_kl),
        "ours half": errors(torch.bfloat16, 1.0, ours),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    fla_interpreted.stub()
    main()
