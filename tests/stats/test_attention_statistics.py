"""Streamed statistics against softmax matrices that are built whole, row by row, in float64.

Shape letters: B batch, T tokens, H query heads, J key/value heads, K key dim.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tc.errors import TCError
from tc.stats import AttentionStatistics, attention

B, H, J, K = 2, 4, 2, 8
SCALING = K**-0.5
KINDS = ("causal", "left", "right", "packed")
NAMES = ("distance", "entropy", "sink_mass", "free_distance", "free_entropy")
FREE = NAMES[3:]


def qk(T: int, seed: int = 0, spread: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, T, K, generator=draw) * spread
    return q, torch.randn(B, J, T, K, generator=draw)


def seen(kind: str, T: int) -> torch.Tensor:
    """bool `[B, T, T]`: what query t may see; the second sequence has the pads or the documents."""
    sees = torch.ones(T, T, dtype=torch.bool).tril().repeat(B, 1, 1)
    cut = T // 3
    if kind == "left":
        sees[1, :, :cut] = False
    elif kind == "right":
        sees[1, :, T - cut :] = False
    elif kind == "packed":
        sees[1, cut:, :cut] = False
        sees[1, cut + 5 :, : cut + 5] = False
    return sees


def streamed(q, k, kind: str) -> dict[str, torch.Tensor]:
    mask = None if kind == "causal" else seen(kind, q.shape[2])[:, None]
    statistics = AttentionStatistics(1, H)
    statistics.add(0, q, k, mask, SCALING)
    return {name: value[0] for name, value in statistics.means().items()}


def brute(q, k, sees: torch.Tensor, sink_of_sequence: bool = False) -> dict[str, torch.Tensor]:
    """The definitions, row by row. `sink_of_sequence` is wrong: token 0, not the document's."""
    means = {name: torch.zeros(H, dtype=torch.float64) for name in NAMES}
    for h in range(H):
        rows = []
        for b in range(B):
            scores = q[b, h].double() @ k[b, h // (H // J)].double().mT * SCALING
            for t in range(q.shape[2]):
                if sees[b, t, t]:
                    keys = sees[b, t].nonzero()[:, 0]
                    sink = 0 if sink_of_sequence else int(keys[0])
                    rows.append(row(scores[t, keys].softmax(0), t - keys, keys == sink))
        plain = {name: sum(r[name] for r in rows) / len(rows) for name in NAMES[:3]}
        mass = sum(r["mass"] for r in rows)
        spread = [r for r in rows if r["keys"] >= 2]
        plain["free_distance"] = sum(r["mass"] * r["free_distance"] for r in rows) / mass
        plain["free_entropy"] = sum(r["mass"] * r["free_entropy"] for r in spread) / sum(
            r["mass"] for r in spread
        )
        for name in NAMES:
            means[name][h] = plain[name]
    return means


def row(p: torch.Tensor, distance: torch.Tensor, is_sink: torch.Tensor) -> dict[str, float]:
    def entropy(x: torch.Tensor) -> float:
        return float(-torch.special.xlogy(x, x).sum())

    free = p[~is_sink]
    mass = float(free.sum())
    rest = free / mass if mass > 0 else free
    return {
        "distance": float((p * distance).sum()),
        "entropy": entropy(p),
        "sink_mass": float(p[is_sink].sum()),
        "mass": mass,
        "keys": len(free),
        "free_distance": float((rest * distance[~is_sink]).sum()),
        "free_entropy": entropy(rest) / math.log(len(free)) if len(free) > 1 else 0.0,
    }


def agree(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float = 1e-5) -> None:
    for name in NAMES:
        torch.testing.assert_close(got[name], want[name], rtol=rtol, atol=1e-12, msg=name)


def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether every head is off by a hundred times what `agree` allows."""
    return bool(((a - b).abs() > 1e-3 * b.abs()).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("T", "queries", "keys"),
    [(20, 128, 128), (20, 7, 7), (20, 6, 7), (20, 7, 5), (20, 1, 1), (150, 128, 128)],
)
def test_equals_full_matrices(monkeypatch, kind: str, T: int, queries: int, keys: int) -> None:
    monkeypatch.setattr(attention, "QUERIES", queries)
    monkeypatch.setattr(attention, "KEYS", keys)
    q, k = qk(T)
    got, want = streamed(q, k, kind), brute(q, k, seen(kind, T))
    agree(got, want)
    # Wrong on purpose: the sink counted as distance, and its own groups for other heads.
    assert differ(got["distance"], want["free_distance"])
    assert differ(streamed(q, k.flip(1), kind)["free_distance"], want["free_distance"])


def test_the_sink_is_each_documents_own_first_token() -> None:
    q, k = qk(40)
    for b, t in ((0, 0), (1, 0), (1, 13), (1, 18)):
        k[b, :, t] = 0
    q[..., 0], k[..., 0] = 6, 0
    for b, t in ((0, 0), (1, 0), (1, 13), (1, 18)):
        k[b, :, t, 0] = 1.0
    got, wrong = streamed(q, k, "packed"), brute(q, k, seen("packed", 40), sink_of_sequence=True)
    agree(got, brute(q, k, seen("packed", 40)))
    assert differ(got["sink_mass"], wrong["sink_mass"])
    assert differ(got["free_distance"], wrong["free_distance"])


@pytest.mark.parametrize("gap", [20.0, 40.0])
def test_heads_that_all_but_live_on_the_sink(gap: float) -> None:
    q, k = qk(30)
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, :, 0, 0] = gap / SCALING
    got, want = streamed(q, k, "causal"), brute(q, k, seen("causal", 30))
    assert want["sink_mass"].min() > 1 - 1e-4
    for name in FREE:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=0)


def test_nothing_left_beside_the_sink_is_no_error() -> None:
    q, k = qk(10)
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, :, 0, 0] = 1e4
    got = streamed(q, k, "causal")
    assert (got["sink_mass"] == 1).all() and (got["free_distance"] == 0).all()


def test_uniform_attention_in_closed_form() -> None:
    T = 33
    got = streamed(torch.zeros(B, H, T, K), qk(T)[1], "causal")
    rows = torch.arange(T, dtype=torch.float64)
    left = rows / (rows + 1)
    want = {
        "distance": (rows / 2).mean(),
        "entropy": (rows + 1).log().mean(),
        "sink_mass": (1 / (rows + 1)).mean(),
        "free_distance": (left * (rows - 1) / 2).sum() / left.sum(),
        "free_entropy": torch.ones((), dtype=torch.float64),
    }
    agree(got, {name: value.expand(H) for name, value in want.items()})


def test_normalised_entropy_does_not_grow_with_the_window() -> None:
    short, long = (streamed(torch.zeros(B, H, T, K), qk(T)[1], "causal") for T in (8, 64))
    torch.testing.assert_close(short["free_entropy"], long["free_entropy"])
    assert (long["entropy"] > 1.5 * short["entropy"]).all()


@pytest.mark.parametrize("kind", ["left", "right"])
@pytest.mark.parametrize("content", [50.0, math.nan, math.inf])
def test_contents_of_pads_never_count(kind: str, content: float) -> None:
    q, k = qk(24)
    want = streamed(q, k, kind)
    real = seen(kind, 24).diagonal(dim1=1, dim2=2)[:, None, :, None]
    q, k = (torch.where(real, x, content) for x in (q, k))
    agree(streamed(q, k, kind), want, rtol=0)


def test_two_batches_add_up_to_one() -> None:
    q, k = qk(20)
    apart = AttentionStatistics(1, H)
    for b in range(B):
        apart.add(0, q[b : b + 1], k[b : b + 1], seen("packed", 20)[b : b + 1, None], SCALING)
    agree({n: v[0] for n, v in apart.means().items()}, streamed(q, k, "packed"), rtol=1e-9)


def test_layers_do_not_mix() -> None:
    statistics = AttentionStatistics(2, H)
    for layer in range(2):
        statistics.add(layer, *qk(12, seed=layer), None, SCALING)
    for layer in range(2):
        got = {n: v[layer] for n, v in statistics.means().items()}
        agree(got, streamed(*qk(12, seed=layer), "causal"), rtol=0)


def test_half_precision_scores_are_not_rounded() -> None:
    q, k = (x.bfloat16() for x in qk(40, spread=6.0))
    want = brute(q, k, seen("causal", 40))
    agree(streamed(q, k, "causal"), want, rtol=1e-4)
    rounded = (q @ k.repeat_interleave(H // J, 1).mT).double() * SCALING
    exact = q.double() @ k.double().repeat_interleave(H // J, 1).mT * SCALING
    assert (rounded - exact).abs().max() > 1e-2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_an_error_that_names_the_layers(value: float) -> None:
    statistics = AttentionStatistics(3, H)
    for layer in range(3):
        q, k = qk(10)
        if layer == 1:
            q[1, 2, 4] = value
        statistics.add(layer, q, k, None, SCALING)
    with pytest.raises(TCError, match=r"layers \[1\]"):
        statistics.means()


def test_no_rows_is_an_error() -> None:
    with pytest.raises(TCError):
        AttentionStatistics(1, H).means()


class Widest(TorchDispatchMode):
    """Notes the most rows of any tensor made with at least T columns, masks aside."""

    def __init__(self, T: int) -> None:
        super().__init__()
        self.T, self.rows = T, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple) else (made,):
            if not isinstance(x, torch.Tensor) or x.dtype == torch.bool:
                continue
            if x.dim() >= 2 and x.shape[-1] >= self.T:
                self.rows = max(self.rows, x.shape[-2])
        return made


@pytest.mark.parametrize("case", ["causal", "packed"])
def test_no_square_matrix_is_ever_held(monkeypatch, case: str) -> None:
    T = 100
    mask = None if case == "causal" else seen(case, T)[:, None]
    for block in (16, T):
        monkeypatch.setattr(attention, "QUERIES", block)
        monkeypatch.setattr(attention, "KEYS", block)
        with Widest(T - 1) as mode:  # all keys but the sink
            AttentionStatistics(1, H).add(0, *qk(T), mask, SCALING)
        # A mask is read by blocks of its rows.
        assert mode.rows == (0 if mask is None and block < T else block)


def test_more_heads_than_are_taken_at_a_time(monkeypatch) -> None:
    q, k = qk(20)
    monkeypatch.setitem(attention.HEADS, "cpu", H - 1)
    agree(streamed(q, k, "causal"), brute(q, k, seen("causal", 20)))


def test_one_mask_for_batches_of_different_sizes() -> None:
    q, k = qk(20)
    mask = seen("causal", 20)[:1, None]
    statistics, wanted = AttentionStatistics(1, H), AttentionStatistics(1, H)
    for rows in (slice(0, 1), slice(0, 2), slice(1, 2)):
        statistics.add(0, q[rows], k[rows], mask, SCALING)
        wanted.add(0, q[rows], k[rows], None, SCALING)
    agree(statistics.sums, wanted.sums)


@pytest.mark.parametrize(
    ("query", "key", "mask"),
    [
        ((B, H + 1, 5, 8), (B, 1, 5, 8), None),
        ((B, H, 5, 8), (B, H - 1, 5, 8), None),
        ((B, H, 0, 8), (B, J, 0, 8), None),
        ((B, H, 5, 8), (B, J, 5, 8), torch.ones(B, 1, 7, 7, dtype=torch.bool)),
        ((B, H, 5, 8), (B, J, 5, 8), torch.ones(B, H, 5, 5, dtype=torch.bool)),
        ((B, H, 5, 8), (B, J, 5, 8), torch.zeros(B, 1, 5, 5)),
    ],
)
def test_what_does_not_fit_is_said(query: tuple, key: tuple, mask: torch.Tensor | None) -> None:
    statistics = AttentionStatistics(1, H)
    with pytest.raises(ValueError, match="do not fit"):
        statistics.add(0, torch.zeros(query), torch.zeros(key), mask, SCALING)


def test_the_first_key_of_a_sliding_window_is_no_sink() -> None:
    q, k = qk(30)
    window = torch.ones(30, 30, dtype=torch.bool).tril().triu(-6).repeat(B, 1, 1)
    statistics = AttentionStatistics(1, H)
    statistics.add(0, q, k, window[:, None], SCALING)
    p = (q.double() @ k.double().repeat_interleave(H // J, 1).mT * SCALING).masked_fill(
        ~window[:, None], -torch.inf
    )
    sink = p.softmax(-1)[:, :, :7, 0].sum((0, 2)) / (B * 30)
    torch.testing.assert_close(statistics.means()["sink_mass"][0], sink, rtol=1e-5, atol=0)
