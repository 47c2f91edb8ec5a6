"""Times the chunked gated delta rule against the one that transformers falls back on.

python experiments/speed/time_operator.py [--lengths 64 256]

Letters: T tokens, H heads. One sequence, float32, one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import extra_bytes, extra_bytes_alone, parse_arguments, show, write
from transformers.models.qwen3_next import modeling_qwen3_next

from tc.meter import median_seconds
from tc.student.ops import gated_delta_rule

LENGTHS = (64, 256, 2048, 8192)
HEADS, HEAD_DIM = 9, 64
TOKENS = 60_000
"""Tokens of all timed calls of one case together: short calls are repeated more often."""

FORWARD_FLOPS = 1.1e9 / 2048
"""Operations of the chunked algorithm a token, all heads, at a chunk of 64 tokens."""

PRODUCTS = 50
"""Calls of torch.bmm of which one sample of the machine's rate consists."""

TOLERANCE = 1e-4

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
theirs = modeling_qwen3_next.torch_chunk_gated_delta_rule
RULES: dict[str, Rule] = {
    "ours": partial(gated_delta_rule, backend="chunk"),
    # Without the decorator, which would look for FLA's kernel.
    "transformers": getattr(theirs, "__wrapped__", theirs),
}


def make_inputs(
    T: int,
    H: int = HEADS,
    head_dim: int = HEAD_DIM,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """q, k, v, g and beta of one sequence; g and beta stay in float32."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, H, head_dim, device=device) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g, beta = -0.2 * torch.rand(1, T, H, device=device), torch.rand(1, T, H, device=device)
    return [x.requires_grad_() for x in (*(x.to(dtype) for x in (q, k, v)), g, beta)]


def forward(rule: Rule, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The read-outs, without what a gradient would need."""
    with torch.no_grad():
        return (rule(*inputs)[0],)


def forward_backward(rule: Rule, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The read-outs and the gradients of all inputs, for a gradient that is v."""
    o = rule(*inputs)[0]
    return (o.detach(), *torch.autograd.grad(o, inputs, inputs[2].detach()))


PASSES = {"forward": forward, "forward+backward": forward_backward}


def largest_difference(seen: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> float:
    """The largest relative RMS difference of any tensor."""
    pairs = [(a.double(), b.double()) for a, b in zip(seen, wanted, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def require_agreement(difference: float, tolerance: float) -> None:
    """Refuses to compare the time of different computations."""
    if not difference < tolerance:
        raise SystemExit(f"the results differ by {difference:.1e}, more than {tolerance:.0e}")


def multiply(a: torch.Tensor, out: torch.Tensor) -> None:
    """Matrix products of one chunk's size for all heads."""
    for _ in range(PRODUCTS):
        torch.bmm(a, a, out=out)


def measure(T: int, name: str) -> dict[str, Any]:
    """A row: one length, one pass."""
    inputs, run = make_inputs(T), PASSES[name]
    difference = largest_difference(*(run(rule, inputs) for rule in RULES.values()))
    require_agreement(difference, TOLERANCE)
    a = torch.randn(HEADS, HEAD_DIM, HEAD_DIM)
    calls = {rule: partial(run, call, inputs) for rule, call in RULES.items()}
    calls["products"] = partial(multiply, a, torch.empty_like(a))
    repeats = min(300, max(7, TOKENS // T))
    took = median_seconds(calls, repeats)
    rate = PRODUCTS * 2 * HEADS * HEAD_DIM**3 / took["products"]
    limit = FORWARD_FLOPS * T / rate
    memory = {rule: extra_bytes_alone(rule, name, T) for rule in RULES}
    return {
        "tokens": T,
        "pass": name,
        "repeats": repeats,
        "ours_ms": took["ours"] * 1e3,
        "transformers_ms": took["transformers"] * 1e3,
        "ratio": took["transformers"] / took["ours"],
        "ours_extra_bytes": memory["ours"],
        "transformers_extra_bytes": memory["transformers"],
        "sgemm_gflops_per_s": rate / 1e9,
        # The issue counts the operations of a forward pass only.
        "ours_share_of_limit": limit / took["ours"] if name == "forward" else None,
        "difference": difference,
    }


def measure_memory(rule: str, name: str, T: int) -> int:
    """What one call needs beyond its inputs; results count."""
    run = PASSES[name]
    run(RULES[rule], make_inputs(65, 1, 16))  # loads libraries and starts autograd's thread
    return extra_bytes(partial(run, RULES[rule], make_inputs(T)))


def main() -> None:
    """Measures and writes all rows."""
    torch.set_num_threads(1)
    arguments = parse_arguments(__doc__, LENGTHS)
    if arguments.alone:
        rule, name, T = arguments.alone
        print(measure_memory(rule, name, int(T)))
        return
    rows = [show(measure(T, name)) for T in arguments.lengths for name in PASSES]
    write(arguments.output, rows)


if __name__ == "__main__":
    main()
