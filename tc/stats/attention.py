"""Statistics of a teacher's attention, streamed over batches and blocks of queries.

Shape letters: B batch, T tokens, Q queries of a block, H query heads, J key/value heads, K key dim.

For a real token t with attention p_tj over the tokens j of its own document:

- plain: distance sum_j p_tj (t - j); entropy -sum_j p_tj log p_tj, in nats; means over all rows.
- without sinks: the document's first token is left out and the row renormalised. A head that rests
  on the first token says little in such a row, so rows weigh by the mass that is left. The entropy
  is divided by log(n) of the n keys that are left (rows with n < 2 have none): it is in [0, 1].

(arXiv 2606.16429, Phase 1, decay and write gate; the published code counts the sink as distance and
does not normalise the entropy.)
"""

from __future__ import annotations

import torch

from tc.errors import TCError

BLOCK = 128
"""Queries of a block: no T x T tensor is ever held, only Q x T ones."""

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


class AttentionStatistics:
    """Sums over rows, for each layer and head, in float64.

    Args:
        num_layers: layers of the teacher.
        num_heads: H.
    """

    def __init__(self, num_layers: int, num_heads: int) -> None:
        self.sums = {n: torch.zeros(num_layers, num_heads, dtype=torch.float64) for n in SUMS}

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
            mask: bool `[B, 1, T, T]`, True where query t may see key j; None for plainly causal. A
                token that may not see itself is padding and counts nowhere.
            scaling: factor of the scores.
        """
        B, H, T, _ = query.shape
        # In float32, as SDPA accumulates them: half-precision scores would be rounded here only.
        key = key.repeat_interleave(H // key.shape[1], dim=1).float()
        for start in range(0, T, BLOCK):
            rows = slice(start, min(start + BLOCK, T))
            sees = _causal(rows, T, query.device) if mask is None else mask[:, 0, rows]
            scores = query[:, :, rows].float() @ key.mT * scaling
            self._add_block(layer, scores, sees.expand(B, -1, T), start)

    def _add_block(self, layer: int, scores: torch.Tensor, sees: torch.Tensor, start: int) -> None:
        """Adds scores `[B, H, Q, T]` of queries from `start` on; `sees` `[B, Q, T]`."""
        Q, T = scores.shape[2:]
        first, sees = _first_seen(sees)[:, None], sees[:, None]
        query = torch.arange(start, start + Q, device=scores.device)
        key = torch.arange(T, device=scores.device)
        real = sees[..., query - start, query]
        scores = scores.masked_fill(~sees, -torch.inf).masked_fill(~real[..., None], 0)
        log_p = scores.log_softmax(-1)
        p = log_p.exp()
        distance = (query[:, None] - key).clamp_min(0).to(p.dtype)
        p_log_p = torch.where(p > 0, p * log_p, 0)

        is_sink = key == first[..., None]
        sink = (p * is_sink).sum(-1)
        # Not 1 - sink, which rounds to nothing where the sink has nearly all of the mass.
        free = p.masked_fill(is_sink, 0).sum(-1)
        number = sees.sum(-1) - 1
        # -sum over j of (p/m) log(p/m), times m for the weight: m log m - sum p log p.
        free_sum = -p_log_p.masked_fill(is_sink, 0).sum(-1) + torch.special.xlogy(free, free)
        counts = real & (number >= 2)
        free_entropy = free_sum / number.clamp_min(2).log()
        weighted = {
            "rows": real.expand_as(sink),
            "distance": (p * distance).sum(-1) * real,
            "entropy": -p_log_p.sum(-1) * real,
            "sink_mass": sink * real,
            "free_mass": free * real,
            "free_distance": (p * distance).masked_fill(is_sink, 0).sum(-1) * real,
            "free_entropy": free_entropy * counts,
            "free_entropy_mass": free * counts,
        }
        for name, value in weighted.items():
            self.sums[name][layer] += value.double().sum((0, 2)).cpu()

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


def _causal(rows: slice, num_tokens: int, device: torch.device) -> torch.Tensor:
    """The rows of a block of the plain causal mask, bool `[1, Q, T]`."""
    query = torch.arange(rows.start, rows.stop, device=device)
    return torch.arange(num_tokens, device=device) <= query[None, :, None]


def _first_seen(sees: torch.Tensor) -> torch.Tensor:
    """The first key that each query sees, `[B, Q]`: its document's first token."""
    return sees.to(torch.int8).argmax(-1)
