"""Statistics of a teacher's attention, streamed over batches and over tiles of queries and keys.

Shape letters: B batch, T tokens, H query heads, J key/value heads, K key dim; in a tile n heads, Q
queries and C keys.

For a real token t with attention p_tj over the tokens j that it sees:

- plain: distance sum_j p_tj (t - j); entropy -sum_j p_tj log p_tj, in nats; means over all rows.
- without sinks: the document's first token is left out and the row renormalised. A head that rests
  on the first token says little in such a row, so rows weigh by the mass that is left. The entropy
  is divided by log(n) of the n keys that are left (rows with n < 2 have none): it is in [0, 1].

(arXiv 2606.16429, Phase 1, decay and write gate; the published code counts the sink as distance and
does not normalise the entropy.)

A row's keys are taken tile by tile, each with its own softmax, and put together by the tiles' sums
(arXiv 1805.02867, 2307.08691). The sink is put in last: what is left beside it keeps its digits,
however little it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tc.errors import TCError

QUERIES, KEYS = 256, 512
"""Queries and keys of a tile."""

HEADS = {"cpu": 12, "cuda": 256}
"""Heads at a time, by device: a CPU wants their tiles in its cache, a GPU wants many."""

NOTHING = -1e30
"""The score of a key that is not seen: finite, since 0 times infinity is no number."""

SUMS = (
    "rows",
    "distance",
    "entropy",
    "sink_mass",
    "free_mass",
    "free_distance",
    "free_entropy",
    "free_entropy_mass",
)


class _Room:
    """Memory for tiles, used again: first touches of new pages cost as much as the arithmetic."""

    def __init__(self) -> None:
        self._flat: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape, of whatever content, over the one that had the name before."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size or flat.device != like.device:
            flat = self._flat[name] = like.new_empty(size)
        return flat[:size].view(shape)


class AttentionStatistics:
    """Sums over rows, for each layer and head, in float64.

    Args:
        num_layers: layers of the teacher.
        num_heads: H.
    """

    def __init__(self, num_layers: int, num_heads: int) -> None:
        self.sums = {n: torch.zeros(num_layers, num_heads, dtype=torch.float64) for n in SUMS}
        self._room = _Room()
        self._last: tuple[torch.Tensor, list[_Seen]] | None = None

    def add(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
    ) -> None:
        """Adds a batch of one layer.

        Args:
            layer: its index.
            query: rotated queries `[B, H, T, K]`.
            key: rotated keys `[B, J, T, K]`, J dividing H.
            mask: bool `[B, 1, T, T]`, or `[1, 1, T, T]` for all sequences alike, True where query t
                may see key j <= t; None for plainly causal. A token that may not see itself is
                padding and counts nowhere. Not to be changed in place between two layers.
            scaling: factor of the scores.

        Raises:
            ValueError: for shapes that do not fit, or a mask that is not bool.
        """
        self._check(query, key, mask)
        H, T = query.shape[1:3]
        for b, seen in enumerate(self._seen(mask, query)):
            # In float32, as SDPA accumulates: half-precision scores would be rounded here only.
            k = key[b].repeat_interleave(H // key.shape[1], dim=0).float()
            for heads in _pieces(0, H, HEADS.get(query.device.type, HEADS["cpu"])):
                blocks = [
                    _row_sums(
                        query[b, heads, rows].float() * scaling, k[heads], seen, rows, self._room
                    )
                    for rows in _pieces(0, T, QUERIES)
                ]
                for name, value in zip(SUMS, torch.stack(blocks).sum(0).cpu(), strict=True):
                    self.sums[name][layer, heads] += value

    def _check(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> None:
        (B, H, T, K), heads = query.shape, len(self.sums["rows"][0])
        fits = heads == H and key.shape == (B, key.shape[1], T, K) and H % key.shape[1] == 0
        if mask is not None:
            square = mask.shape in ((B, 1, T, T), (1, 1, T, T))
            fits = fits and square and mask.dtype == torch.bool
        if not fits or 0 in query.shape:
            masked = "None" if mask is None else f"{mask.dtype} {list(mask.shape)}"
            raise ValueError(
                f"query {list(query.shape)}, key {list(key.shape)} and mask {masked} do not fit; "
                f"wanted [B, {heads}, T, K], [B, J, T, K] with J dividing {heads}, and None or "
                "torch.bool [B, 1, T, T], none of them empty"
            )

    def _seen(self, mask: torch.Tensor | None, query: torch.Tensor) -> list[_Seen]:
        """What the rows of each sequence see; all layers that share a mask share this."""
        B, T = query.shape[0], query.shape[2]
        if mask is None:
            return [_Seen.causal(T, query.device)] * B
        if self._last is None or self._last[0] is not mask or len(self._last[1]) != B:
            self._last = mask, [_Seen.of(sees) for sees in mask[:, 0].expand(B, -1, -1)]
        return self._last[1]

    def means(self) -> dict[str, torch.Tensor]:
        """The means, each `[L, H]` float64: distances in tokens, entropy in nats or normalised.

        Raises:
            TCError: if a layer has no rows or a statistic is not finite.
        """
        s = self.sums
        tiny = torch.finfo(torch.float64).tiny
        means = {
            "distance": s["distance"] / s["rows"],
            "entropy": s["entropy"] / s["rows"],
            "sink_mass": s["sink_mass"] / s["rows"],
            "free_distance": s["free_distance"] / s["free_mass"].clamp_min(tiny),
            "free_entropy": s["free_entropy"] / s["free_entropy_mass"].clamp_min(tiny),
        }
        for name, value in means.items():
            bad = sorted({int(i) for i in (~value.isfinite()).nonzero()[:, 0]})
            if bad:
                raise TCError(
                    f"the teacher's attention statistic {name!r} is not finite in layers {bad}: "
                    "its weights or activations hold NaN or infinity. Try teacher.dtype=float32, "
                    "or another checkpoint."
                )
        return means


@dataclass
class _Seen:
    """What the rows of one sequence see.

    Attributes:
        sees: bool `[T, T]`, or None for plainly causal.
        real: bool `[T]`, False for padding.
        sink: the first token of each row's document, `[T]`.
        has_sink: bool `[T]`, False for rows whose first key is no document's first token, as in
            a sliding window.
        free: how many keys a row sees without the sink, `[T]`.
    """

    sees: torch.Tensor | None
    real: torch.Tensor
    sink: torch.Tensor
    has_sink: torch.Tensor
    free: torch.Tensor

    @classmethod
    def causal(cls, T: int, device: torch.device) -> _Seen:
        """Every row sees all before it."""
        rows = torch.arange(T, device=device)
        real = torch.ones(T, dtype=torch.bool, device=device)
        return cls(None, real, torch.zeros_like(rows), real, rows)

    @classmethod
    def of(cls, sees: torch.Tensor) -> _Seen:
        """Reads a mask, block by block of its rows."""
        T = len(sees)
        blocks = [sees[rows] for rows in _pieces(0, T, QUERIES)]
        first = torch.cat([x.to(torch.int8).argmax(-1) for x in blocks])
        number = torch.cat([x.sum(-1) for x in blocks])
        # A document's first token sees itself alone.
        has_sink = (number == 1)[first]
        return cls(sees, sees.diagonal(), first, has_sink, number - has_sink.long())

    def left_out(self, rows: slice, keys: slice) -> torch.Tensor | None:
        """The keys of a tile that a row does not count: unseen ones and the sink.

        Returns:
            bool `[Q, C]`, or None where every row counts every key.
        """
        device = self.sink.device
        key = torch.arange(keys.start, keys.stop, device=device)
        if self.sees is None:
            if keys.stop <= rows.start + 1:
                return None
            return key > torch.arange(rows.start, rows.stop, device=device)[:, None]
        sink = self.sink[rows].where(self.has_sink[rows], -1)
        out = ~self.sees[rows, keys] | (key == sink[:, None])
        return out if out.any() else None


def _pieces(start: int, stop: int, size: int) -> Iterator[slice]:
    """Cuts a range to slices of a size."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _row_sums(
    q: torch.Tensor, k: torch.Tensor, seen: _Seen, rows: slice, room: _Room
) -> torch.Tensor:
    """The sums over some rows of some heads.

    Args:
        q: scaled queries of the rows, `[n, Q, K]`.
        k: keys of the sequence, `[n, T, K]`.
        seen: what the sequence's rows see.
        rows: which rows they are.
        room: memory for the tiles.

    Returns:
        In the order of `SUMS`, `[len(SUMS), n]`, float64.
    """
    real, sink, has_sink = (x[rows] for x in (seen.real, seen.sink, seen.has_sink))
    query = torch.arange(rows.start, rows.stop, device=q.device)
    free, distance, entropy = _free_means(q, k, seen, rows, room)
    score = (q * k[:, sink]).sum(-1).masked_fill(~has_sink, NOTHING)
    # Of a row that sees no free key, their logarithm is NOTHING and their share 0.
    (free_mass, sink_mass), between = _shares(torch.stack((free, score)))
    number = seen.free[rows]
    normalised = torch.where(number >= 2, entropy / number.clamp_min(2).log(), 0)
    values = {
        "rows": torch.ones_like(free_mass),
        "distance": free_mass * distance + sink_mass * (query - sink),
        "entropy": between + free_mass * entropy,
        "sink_mass": sink_mass,
        "free_mass": free_mass,
        "free_distance": free_mass * distance,
        "free_entropy": free_mass * normalised,
        "free_entropy_mass": free_mass * (number >= 2),
    }
    stacked = torch.stack([values[name] for name in SUMS])
    return stacked.where(real, 0).double().sum(-1)


def _free_means(
    q: torch.Tensor, k: torch.Tensor, seen: _Seen, rows: slice, room: _Room
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax over a row's keys but the sink, with arguments as `_row_sums`.

    Returns:
        Each `[n, Q]`: the logarithm of the sum of exp(score), the mean distance and the entropy in
        nats. Of a row without such a key they are `NOTHING` and two finite numbers of no meaning.
    """
    query = torch.arange(rows.start, rows.stop, device=q.device)
    tiles = []
    # Where all rows are causal, no tile holds the one sink.
    for keys in _pieces(int(seen.sees is None), rows.stop, KEYS):
        left_out = seen.left_out(rows, keys)
        # A plainly causal tile has a key for its last row: no need to look (or to wait for a GPU).
        if left_out is not None and seen.sees is not None and left_out.all():
            continue
        shape = (*q.shape[:-1], keys.stop - keys.start)
        scores = torch.bmm(q, k[:, keys].mT, out=room.take("scores", shape, q))
        if left_out is not None:
            scores.masked_fill_(left_out, NOTHING)
        peak = scores.amax(-1)
        p = torch.softmax(scores, -1, out=room.take("p", shape, q))
        # The likeliest key has p = exp(0) / sum.
        log_sum = -p.amax(-1).log()
        entropy = log_sum - scores.sub_(peak[..., None]).mul_(p).sum(-1)
        key = torch.arange(keys.start, keys.stop, device=q.device)
        if keys.stop <= rows.start:
            # Both terms are positive: nothing near is lost in the difference of far positions.
            distance = (query - keys.stop) + p @ (keys.stop - key).to(p.dtype)
        else:
            distance = p.mul_((query[:, None] - key).clamp_min(0)).sum(-1)
        tiles.append(torch.stack((peak + log_sum, distance, entropy)))
    if not tiles:
        nothing = q.new_full(q.shape[:-1], NOTHING)
        return nothing, torch.zeros_like(nothing), torch.zeros_like(nothing)
    log_sum, distance, entropy = torch.stack(tiles, dim=1)
    share, between = _shares(log_sum)
    return log_sum.logsumexp(0), (share * distance).sum(0), between + (share * entropy).sum(0)


def _shares(log_sum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What each group of keys has of a row, from the logarithms of its sums, `[groups, ...]`.

    Returns:
        The shares and their entropy in nats. A row's entropy is that, and each group's by its
        share.
    """
    share = log_sum.softmax(0)
    return share, -torch.special.xlogy(share, share).sum(0)
