"""The gated delta rule by FLA's Triton kernels, for CUDA tensors.

Shape letters: B batch, T tokens, H heads, K key dim, V value dim, S sequences.
"""

from __future__ import annotations

import torch

from tc.errors import TCError
from tc.student.ops.loop import empty_state


def fla_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None,
    resets: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs FLA's chunked kernel; arguments as `gated_delta_rule`, heads expanded.

    Returns:
        Read-outs `[B, T, H, V]` and the final state `[B, H, K, V]`.

    Raises:
        TCError: if flash-linear-attention is not installed.
    """
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise TCError(
            "the back end fla needs a package: pip install flash-linear-attention. Or take "
            "trainer.backend=chunk, and for a saved student gdn.form.backend in its config.json"
        ) from error
    state = empty_state(q, v, initial_state)
    inputs = (q, k, v, g, beta)
    if resets is None:
        return chunk_gated_delta_rule(
            *inputs, scale=scale, initial_state=state, output_final_state=True
        )
    # The kernel takes documents as one long row and their starts.
    starts, first = _sequence_starts(resets)
    states = state.new_zeros(len(starts) - 1, *state.shape[1:])
    states[first] = state.masked_fill(resets[:, 0, None, None, None], 0)
    o, states = chunk_gated_delta_rule(
        *(x.flatten(0, 1)[None] for x in inputs),
        scale=scale,
        initial_state=states,
        output_final_state=True,
        cu_seqlens=starts,
    )
    last = torch.cat([first[1:], first.new_tensor([len(starts) - 1])]) - 1
    return o.view_as(v), states[last]


def _sequence_starts(resets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where sequences start in the flattened batch.

    Returns:
        `cu_seqlens` `[S + 1]`, and for each row the index of its first sequence `[B]`.
    """
    B, T = resets.shape
    begins = resets.clone()
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([starts, starts.new_tensor([B * T])])
    first = torch.searchsorted(starts, torch.arange(0, B * T, T, device=starts.device))
    return cu_seqlens, first
