"""Layer-local alignment: a mixer learns its teacher layer's output on the teacher's own inputs.

Source: arXiv 2606.16429, Phase 2. Shape letters: B batch, T tokens, H heads, V value dim, D
model dim.
"""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from torch import nn

from tc.config import AlignConfig, Schedule
from tc.errors import TCError
from tc.init import relative_error
from tc.init.measure import features
from tc.stats import LayerBatch
from tc.student.mixer import GatedDeltaNet, mixer_state
from tc.teacher.attention import Attention

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class LayerAlignment(L.LightningModule):
    """Minimises ||student - teacher||^2 / ||teacher||^2 of one layer, teacher-forced.

    Args:
        mixer: trained in place, in float32.
        attention: the teacher's attention module; only its o_proj is used, and never trained.
        selection: held-out activations that the best state is chosen on.
        cfg: learning rates, steps and the rest.
    """

    def __init__(
        self,
        mixer: GatedDeltaNet,
        attention: Attention,
        selection: LayerBatch,
        cfg: AlignConfig,
    ) -> None:
        super().__init__()
        self.mixer, self.cfg = mixer, cfg
        # In a tuple, so that neither becomes a part of this module: the teacher stays out of the
        # optimizer and of every checkpoint.
        self._outside = (attention, selection)

    def training_step(self, batch: tuple[torch.Tensor, ...], _: int) -> torch.Tensor:
        """The relative error of a batch of (x, context, starts)."""
        part = LayerBatch(*batch)
        with torch.no_grad():
            teacher = self._outside[0].o_proj(part.context)
        student = self.mixer.o_proj(features(self.mixer, part))
        loss = (student - teacher).square().sum() / teacher.square().sum()
        if not loss.isfinite():
            raise TCError(
                f"the alignment loss of layer {self.mixer.layer_idx} is {loss.item()} at step "
                f"{self.global_step}. Try smaller align.lr_projections and align.lr_dynamics, or "
                "align.gradient_clip=1.0."
            )
        return loss

    def held_out_error(self) -> float:
        """The relative error on selection tokens of the mixer as it is now."""
        return relative_error(self.mixer, *self._outside)

    def configure_optimizers(self) -> Any:
        """AdamW by `parameter_groups`, and the schedule."""
        optimizer = torch.optim.AdamW(parameter_groups(self.mixer, self.cfg))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _factor(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / max(1, self.cfg.warmup_steps))
        if self.cfg.schedule is Schedule.constant:
            return warmup
        return warmup * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.cfg.steps)))


def parameter_groups(mixer: GatedDeltaNet, cfg: AlignConfig) -> list[dict[str, Any]]:
    """Two learning rates, and weight decay on matrices alone.

    A_log, dt_bias, norms and biases are vectors: decaying them would pull half-lives and scales to
    arbitrary values.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in mixer.named_parameters():
        lr = cfg.lr_projections if name.split(".")[0] in PROJECTIONS else cfg.lr_dynamics
        decay = cfg.weight_decay if parameter.dim() >= 2 else 0.0
        groups.setdefault((lr, decay), []).append(parameter)
    return [{"params": p, "lr": lr, "weight_decay": wd} for (lr, wd), p in groups.items()]


class BestState(L.Callback):
    """Keeps the weights with the smallest held-out error.

    They are copied where they are measured, before the next step changes them.

    Attributes:
        error: the smallest error.
        step: the optimizer steps that it took.
        history: every (step, error) that was measured.
    """

    def __init__(self, check_every: int) -> None:
        self.check_every = check_every
        self.error, self.step = math.inf, 0
        self.history: list[tuple[int, float]] = []
        self.state: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measures the start, which may be the best there is."""
        self._measure(trainer.global_step, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object
    ) -> None:
        """Measures every `check_every` steps and after the last one."""
        step = trainer.global_step
        if step % self.check_every == 0 or step == trainer.max_steps:
            self._measure(step, pl_module)

    def _measure(self, step: int, module: L.LightningModule) -> None:
        assert isinstance(module, LayerAlignment)
        error = module.held_out_error()
        self.history.append((step, error))
        if error < self.error:
            self.error, self.step = error, step
            self.state = {k: v.clone() for k, v in mixer_state(module.mixer).items()}
