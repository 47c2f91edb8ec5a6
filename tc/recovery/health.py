"""How the recurrences of a student are: half-lives, write strengths, gates and states, by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tc.student.mixer import GatedDeltaNet


@contextmanager
def watching(mixers: Mapping[int, GatedDeltaNet]) -> Iterator[dict[int, dict[str, float]]]:
    """Records the health of every mixer that runs inside, in its last pass; yields it by layer.

    `half_life` in tokens, the median over heads of ln 2 / mean decay a token; `beta`, the mean
    write strength; `gate_rms`, of the output gate; `state_norm`, the mean Frobenius norm of a
    head's last state. Of a text that is read in pieces, the last piece is seen. It looks from
    inside the mixer's own forward pass, where the weights are whole even if they are sharded
    elsewhere.
    """
    found: dict[int, dict[str, float]] = {}
    for layer, mixer in mixers.items():
        plain = mixer.read_out
        mixer.read_out = partial(_look, mixer, plain, found, layer)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for mixer in mixers.values():
            del mixer.read_out


def _look(
    mixer: GatedDeltaNet,
    plain: Any,
    found: dict[int, dict[str, float]],
    layer: int,
    hidden_states: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A mixer's read-out, with a look at it."""
    o, state = plain(hidden_states, **{**kwargs, "output_final_state": True})
    with torch.no_grad():
        decay = -mixer.log_decay(hidden_states).mean((0, 1))
        facts = {
            "half_life": float((math.log(2) / decay.clamp_min(1e-9)).median()),
            "beta": float(mixer.b_proj(hidden_states).float().sigmoid().mean()),
            "state_norm": float(state.float().flatten(2).norm(dim=-1).mean()),
        }
        if mixer.form.use_gate:
            gate = F.silu(mixer.g_proj(hidden_states).float())
            facts["gate_rms"] = float(gate.square().mean().sqrt())
    found[layer] = facts
    return o, state if kwargs.get("output_final_state") else None
