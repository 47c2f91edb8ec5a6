"""Which layers keep softmax attention."""

from __future__ import annotations

from tc.config import PolicyConfig, PolicyKind
from tc.errors import TCError


def kept_layers(cfg: PolicyConfig, num_layers: int) -> list[int]:
    """The layers that keep attention, ascending.

    Args:
        cfg: a validated policy.
        num_layers: layers of the teacher.

    Raises:
        TCError: if a listed layer does not exist.
    """
    if cfg.kind is PolicyKind.every:
        assert cfg.stride is not None
        return list(range(0, num_layers, cfg.stride))
    if cfg.kind is PolicyKind.layers:
        return _listed(cfg.keep or [], num_layers)
    return list(range(num_layers)) if cfg.kind is PolicyKind.all else []


def converted_layers(cfg: PolicyConfig, num_layers: int) -> list[int]:
    """The layers whose attention is replaced, ascending."""
    kept = set(kept_layers(cfg, num_layers))
    return [i for i in range(num_layers) if i not in kept]


def _listed(keep: list[int], num_layers: int) -> list[int]:
    outside = sorted({i for i in keep if not 0 <= i < num_layers})
    if outside:
        raise TCError(
            f"policy.keep={list(keep)}: the teacher has layers 0 to {num_layers - 1}, not "
            f"{', '.join(map(str, outside))}."
        )
    return sorted(set(keep))
