"""How far a model is from its teacher, or from the text, where some layers are replaced.

Shape letters: N sequences, B batch, T tokens, D model dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from tc.data import Packed
from tc.errors import TCError
from tc.recovery.losses import IGNORED, distillation_loss
from tc.recovery.model import next_tokens
from tc.select.trunk import Bypassed, Trunk, with_attention
from tc.student.hybrid import cast
from tc.student.mixer import GatedDeltaNet

Variant = tuple[int, ...]
"""The layers that are treated otherwise than the others; the last one is on trial."""

Loss = Callable[[Variant], float]
"""Of a variant, in nats a token; lower is better."""


class BypassLoss:
    """The teacher's negative log-likelihood, with the attention of one layer bypassed or none.

    Args:
        model: the teacher.
        tokens: selection tokens; a token that ends a document or a sequence has nothing to predict.
    """

    def __init__(self, model: PreTrainedModel, tokens: Packed) -> None:
        self.trunk = Trunk(model, list(model.model.layers), tokens)
        self.head = model.lm_head.weight
        self.targets = next_tokens(tokens.input_ids, tokens.position_ids)

    @torch.no_grad()
    def __call__(self, variant: Variant) -> float:
        """The mean over predicted tokens; a variant is one layer or none."""
        index = variant[-1] if variant else None
        layer = None if index is None else with_attention(self.trunk.layers[index], Bypassed())
        total = 0.0
        for rows, hidden in self.trunk.finals(index, layer):
            targets = self.targets[rows].flatten().to(hidden.device)
            loss = distillation_loss(hidden, None, self.head, None, targets, kl=0.0, ce=1.0)
            total += float(loss.ce) * len(targets)
        return _finite(total / int((self.targets != IGNORED).sum()), "bypasses", variant)


class HybridLoss:
    """KL(teacher || student) of students that keep some layers, every other one being converted.

    The teacher's log-probabilities are made anew of its final hidden states, chunk by chunk: no
    `[tokens, vocabulary]` tensor is ever held.

    Args:
        model: the teacher.
        mixers: a mixer of every layer; cast to the teacher's dtype in place.
        tokens: selection tokens.
    """

    def __init__(
        self, model: PreTrainedModel, mixers: dict[int, GatedDeltaNet], tokens: Packed
    ) -> None:
        self.head, self.kept = model.lm_head.weight, set[int]()
        teacher = Trunk(model, list(model.model.layers), tokens)
        self.attending = teacher.layers
        self.targets = [hidden.cpu() for _, hidden in teacher.finals()]
        self.converted = [
            with_attention(layer, cast(mixers[i], model.dtype))
            for i, layer in enumerate(self.attending)
        ]
        self.trunk = Trunk(model, self.converted, tokens)

    @torch.no_grad()
    def __call__(self, variant: Variant) -> float:
        """The mean over tokens for a student that keeps just the variant's layers.

        All but the last of them are kept in the trunk too, and cost nothing in the next variant
        that begins with the same.
        """
        self._keep(set(variant[:-1]))
        index = variant[-1] if variant else None
        layer = None if index is None else self.attending[index]
        finals, total, tokens = self.trunk.finals(index, layer), 0.0, 0
        for (_, student), teacher in zip(finals, self.targets, strict=True):
            target = teacher.to(student.device)
            loss = distillation_loss(student, target, self.head, self.head)
            total += float(loss.kl) * len(target)
            tokens += len(target)
        return _finite(total / tokens, "keeps", variant)

    def _keep(self, layers: set[int]) -> None:
        for i in sorted(layers ^ self.kept):
            self.trunk.put(i, self.attending[i] if i in layers else self.converted[i])
        self.kept = layers


def _finite(loss: float, verb: str, variant: Variant) -> float:
    if not math.isfinite(loss):
        raise TCError(
            f"the loss of the model that {verb} layers {sorted(variant)} is {loss} on selection "
            "tokens. Try teacher.dtype=float32, or another init."
        )
    return loss
