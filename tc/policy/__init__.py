"""Which layers keep softmax attention, as far as a configuration says it."""

from __future__ import annotations

from tc.config import PolicyConfig, PolicyKind

SEARCHES = (PolicyKind.ar, PolicyKind.ga_s2, PolicyKind.greedy)
"""Kinds whose layers are known only once `tc.select` has scored them."""


def searches(cfg: PolicyConfig) -> bool:
    """Whether layers are scored before they are chosen."""
    return cfg.kind in SEARCHES


def needs_all_mixers(cfg: PolicyConfig) -> bool:
    """Whether the scores are of students, which are made of a mixer of every layer."""
    return cfg.kind in (PolicyKind.ga_s2, PolicyKind.greedy)


def num_kept(cfg: PolicyConfig, num_layers: int) -> int:
    """How many layers keep attention, which is known before any search.

    Args:
        cfg: a policy that `tc.check` has found to fit the teacher.
        num_layers: layers of the teacher.
    """
    if cfg.count is not None:
        return cfg.count
    if cfg.share is not None:
        return int(cfg.share * num_layers + 0.5)
    return len(kept_layers(cfg, num_layers))


def kept_layers(cfg: PolicyConfig, num_layers: int) -> list[int]:
    """The layers that keep attention, ascending.

    Args:
        cfg: such a policy that does not search.
        num_layers: layers of the teacher.
    """
    assert not searches(cfg), f"{cfg.kind} knows its layers only after stage select"
    if cfg.kind is PolicyKind.every:
        assert cfg.stride is not None
        return list(range(0, num_layers, cfg.stride))
    if cfg.kind is PolicyKind.ratio:
        number = num_kept(cfg, num_layers)
        return [i * num_layers // number for i in range(number)]
    if cfg.kind is PolicyKind.layers:
        return sorted(set(cfg.keep or []))
    return list(range(num_layers)) if cfg.kind is PolicyKind.all else []


def converted_layers(cfg: PolicyConfig, num_layers: int) -> list[int]:
    """The layers whose attention is replaced, ascending, of a policy that does not search."""
    return others(kept_layers(cfg, num_layers), num_layers)


def others(layers: list[int], num_layers: int) -> list[int]:
    """All layers but the given ones, ascending."""
    return [i for i in range(num_layers) if i not in layers]
