"""Teacher and student as one module, whose forward pass gives the losses.

One module, because under FSDP the parts of a sharded model are whole only inside its own forward
pass. Shape letters: B batch, T tokens, D model dim, N = B T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tc.config import KL, EndToEndConfig
from tc.recovery.losses import (
    IGNORED,
    distillation_loss,
    fla_kl,
    layer_distance,
    stream_error,
)
from tc.student.mixer import GatedDeltaNet


class Distillation(nn.Module):
    """A frozen teacher and a student that learns from it.

    Args:
        teacher: in evaluation mode; nothing of it is trained.
        student: its mixers, and with them whatever else requires a gradient, are trained.
        terms: the losses of stage 2, or None for stage 1.
        kl_backend: which KL divergence runs.
        recompute: keep only the layers' inputs for the backward pass.

    Attributes:
        finite: whether what each layer of the student said in the last pass of stage 2 is finite.
    """

    def __init__(
        self,
        teacher: PreTrainedModel,
        student: PreTrainedModel,
        terms: EndToEndConfig | None,
        kl_backend: KL,
        recompute: bool,
    ) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student
        self.terms, self.kl_backend, self.recompute = terms, kl_backend, recompute
        self.finite: dict[int, torch.Tensor] = {}

    @property
    def mixers(self) -> dict[int, GatedDeltaNet]:
        """The student's mixers by layer."""
        mixers: dict[int, GatedDeltaNet] = self.student.mixers
        return mixers

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, which: str = "losses"
    ) -> dict[str, torch.Tensor]:
        """What is asked for of packed sequences.

        Args:
            input_ids: `[B, T]`.
            position_ids: `[B, T]`, 0 where a document begins.
            which: `losses`; or `nll` for negative log-likelihoods of teacher and student.

        Returns:
            `losses`: `loss`, which has a gradient, and its parts without one: `layer_<i>` of stage
            1, the unweighted `kl`, `ce` and `hidden` of stage 2. `nll`: `teacher` and `student`,
            sums over targets, and `tokens`, their number.
        """
        ids, positions = input_ids.long(), position_ids.long()
        if which == "nll":
            return self._nll(ids, positions)
        return self._layers(ids, positions) if self.terms is None else self._whole(ids, positions)

    def _layers(self, ids: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Stage 1: each mixer on what its teacher layer read, against what that said."""
        with _attention_of(self.teacher, self.mixers) as seen, torch.no_grad():
            self.teacher.model(input_ids=ids, position_ids=positions, use_cache=False)
        losses = {}
        for layer, mixer in self.mixers.items():
            x, target = seen.pop(layer)
            output = self._mix(mixer, x.float(), positions)
            losses[f"layer_{layer}"] = layer_distance(output, target)
        loss = torch.stack(list(losses.values())).mean()
        return {"loss": loss, **{name: value.detach() for name, value in losses.items()}}

    def _mix(self, mixer: GatedDeltaNet, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return mixer(x, position_ids=positions)[0]

        if self.recompute and torch.is_grad_enabled():
            output: torch.Tensor = checkpoint(run, x, use_reentrant=False)
            return output
        return run(x)

    def _whole(self, ids: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Stage 2: the student on the text, against the teacher's logits."""
        terms = self.terms
        assert terms is not None
        asked = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        asked["output_hidden_states"] = terms.hidden > 0
        with torch.no_grad():
            teacher = self.teacher.model(**asked)
        with _finiteness_of(self.student) as self.finite:
            student = self.student.model(**asked)
        heads = self.student.lm_head.weight, self.teacher.lm_head.weight
        last = student.last_hidden_state.flatten(0, 1), teacher.last_hidden_state.flatten(0, 1)
        loss: torch.Tensor | float = 0.0
        parts = {}
        if terms.kl and self.kl_backend is KL.fla:
            kl = fla_kl(*last, *heads)
            loss, parts = terms.kl * kl, {"kl": kl.detach()}
        elif terms.kl or terms.ce:
            loss, kl, ce = distillation_loss(
                *last,
                *heads,
                targets=next_tokens(ids, positions).flatten() if terms.ce else None,
                kl=terms.kl,
                ce=terms.ce,
                temperature=terms.temperature,
            )
            parts = {name: x for name, x in (("kl", kl), ("ce", ce)) if getattr(terms, name)}
        if terms.hidden:
            error = stream_error(student.hidden_states[1:], teacher.hidden_states[1:])
            loss, parts = loss + terms.hidden * error, {**parts, "hidden": error.detach()}
        assert isinstance(loss, torch.Tensor)
        return {"loss": loss, **parts}

    def _nll(self, ids: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        targets = next_tokens(ids, positions).flatten()
        found = {"tokens": (targets != IGNORED).sum()}
        for name in ("teacher", "student"):
            model = getattr(self, name)
            hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False)
            head = model.lm_head.weight
            x = hidden.last_hidden_state.flatten(0, 1)
            _, _, mean = distillation_loss(x, None, head, None, targets=targets, kl=0.0, ce=1.0)
            found[name] = mean.double() * len(targets)
        return found


def next_tokens(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What each token is to predict, `[B, T]`; `IGNORED` where a document or a sequence ends."""
    following = torch.where(positions[:, 1:] == 0, IGNORED, ids[:, 1:])
    return nn.functional.pad(following, (0, 1), value=IGNORED)


@contextmanager
def _finiteness_of(student: PreTrainedModel) -> Iterator[dict[int, torch.Tensor]]:
    """Keeps whether what the layers say is finite, a tensor each, so that a GPU need not wait."""
    found: dict[int, torch.Tensor] = {}

    def keeping(layer: int) -> Callable[..., None]:
        def keep(_: nn.Module, __: tuple, output: Any) -> None:
            stream = output[0] if isinstance(output, tuple) else output
            found[layer] = stream.detach().sum(dtype=torch.float32).isfinite()

        return keep

    handles = [
        layer.register_forward_hook(keeping(i)) for i, layer in enumerate(student.model.layers)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _attention_of(
    teacher: PreTrainedModel, layers: dict[int, Any]
) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Keeps what the attention modules of some layers read and say, both `[B, T, D]`."""
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keeping(layer: int) -> Callable[..., None]:
        def keep(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            seen[layer] = (args[0] if args else kwargs["hidden_states"], output[0])

        return keep

    handles = [
        teacher.model.layers[i].self_attn.register_forward_hook(keeping(i), with_kwargs=True)
        for i in layers
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
