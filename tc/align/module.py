"""What is minimised: of a layer, its teacher's output; of a block, what the next layer is to read.

Source of the first: arXiv 2606.16429, Phase 2. Shape letters: N sequences, B batch, T tokens, H
heads, V value dim, D model dim.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import nn

from tc.config import AlignConfig, OptimizerKind
from tc.errors import TCError
from tc.init import relative_error
from tc.init.measure import features
from tc.optim import MuonAdamW, parameter_groups, rate_factor, trained_by_muon
from tc.stats import LayerBatch
from tc.student.mixer import GatedDeltaNet
from tc.teacher.attention import Attention
from tc.teacher.stream import BATCH, Stream

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Alignment(L.LightningModule):
    """Trains mixers; its state dict is theirs and nothing else's.

    Args:
        mixers: trained in place, in float32.
        cfg: learning rates, steps and the rest.
    """

    rates: str
    """What to lower where a loss is not finite."""

    def __init__(self, mixers: Iterable[GatedDeltaNet], cfg: AlignConfig) -> None:
        super().__init__()
        self.mixers, self.cfg = nn.ModuleList(mixers), cfg

    @abstractmethod
    def held_out_error(self) -> float:
        """The relative error on selection tokens of the mixers as they are now."""

    def configure_optimizers(self) -> Any:
        """One rate for projections, one for the rest, and the schedule."""
        optimizer = MuonAdamW(groups_of(self.mixers, self.cfg))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _factor(self, step: int) -> float:
        return rate_factor(self.cfg.schedule, step, self.cfg.steps, self.cfg.warmup_steps)

    def _relative(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """||student - teacher||^2 / ||teacher||^2 as a loss.

        Raises:
            TCError: if it is not finite.
        """
        loss = (student - teacher).square().sum() / teacher.square().sum()
        if not loss.isfinite():
            layers = ", ".join(str(mixer.layer_idx) for mixer in self.mixers)
            raise TCError(
                f"the alignment loss of layer {layers} is {loss.item()} at step "
                f"{self.global_step}. Try smaller {self.rates}, or align.gradient_clip=1.0."
            )
        return loss


class LayerAlignment(Alignment):
    """Minimises ||student - teacher||^2 / ||teacher||^2 of one layer, teacher-forced.

    Args:
        mixer: trained in place, in float32.
        attention: the teacher's attention module; only its o_proj is used, and never trained.
        selection: held-out activations that the best state is chosen on.
        cfg: learning rates, steps and the rest.
    """

    rates = "align.lr_projections and align.lr_dynamics"

    def __init__(
        self,
        mixer: GatedDeltaNet,
        attention: Attention,
        selection: LayerBatch,
        cfg: AlignConfig,
    ) -> None:
        super().__init__([mixer], cfg)
        # In a tuple, so that neither becomes a part of this module: the teacher stays out of the
        # optimizer and of every checkpoint.
        self._outside = (attention, selection)

    def training_step(self, batch: tuple[torch.Tensor, ...], _: int) -> torch.Tensor:
        """The relative error of a batch of (x, context, starts)."""
        part = LayerBatch(*batch)
        with torch.no_grad():
            teacher = self._outside[0].o_proj(part.context)
        return self._relative(self.mixer.o_proj(features(self.mixer, part)), teacher)

    @property
    def mixer(self) -> GatedDeltaNet:
        """The one that is trained."""
        mixer = self.mixers[0]
        assert isinstance(mixer, GatedDeltaNet)
        return mixer

    def held_out_error(self) -> float:
        """The relative error on selection tokens of the mixer as it is now."""
        return relative_error(self.mixer, *self._outside)


class BlockAlignment(Alignment):
    """Minimises the relative error of what the layer behind a block reads, on the student's stream.

    With h the student's residual stream in front of the block, f the block's decoder layers and
    norm that of the layer behind (the final one behind the last): ||norm(f(h)) - x||^2 / ||x||^2,
    where x is what the teacher's layer behind the block reads. The norm takes out the few tokens
    whose stream is a thousand times larger than the others'.

    Args:
        mixers: of the block.
        layers: the block's decoder layers in float32, the mixers in them.
        norm: of the layer behind, in float32.
        streams: the student's stream in front of the block, `calibration` and `selection`.
        targets: x `[N, T, D]`, by the same names.
        cfg: learning rates, steps and the rest.
    """

    rates = "align.block_lr_projections and align.block_lr_dynamics"

    def __init__(
        self,
        mixers: list[GatedDeltaNet],
        layers: list[nn.Module],
        norm: nn.Module,
        streams: dict[str, Stream],
        targets: dict[str, torch.Tensor],
        cfg: AlignConfig,
    ) -> None:
        super().__init__(mixers, cfg)
        # In a tuple, as above: of the layers, only the mixers are a part of this module.
        self._outside = (layers, norm, streams, targets)

    def training_step(self, batch: tuple[torch.Tensor], _: int) -> torch.Tensor:
        """The relative error of the sequences whose numbers are given."""
        return self._relative(*self._both("calibration", batch[0].cpu()))

    @torch.no_grad()
    def held_out_error(self) -> float:
        """The relative error on selection tokens of the mixers as they are now."""
        gap, power = 0.0, 0.0
        for start in range(0, len(self._outside[2]["selection"]), BATCH):
            student, teacher = self._both("selection", slice(start, start + BATCH))
            gap += float((student - teacher).double().square().sum())
            power += float(teacher.double().square().sum())
        return gap / power

    def _both(self, part: str, rows: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer behind reads of some sequences, the student's and the teacher's."""
        layers, norm, streams, targets = self._outside
        student = norm(streams[part].run(layers, rows))
        return student, targets[part][rows].to(student)


def groups_of(mixers: nn.ModuleList, cfg: AlignConfig) -> list[dict[str, Any]]:
    """The parameter groups of mixers: one learning rate for projections, one for the rest.

    Muon's rate is for the matrices that it trains: a bias of q, k or v goes with the rest then.
    """

    def rate(name: str) -> float:
        if cfg.optimizer is OptimizerKind.muon:
            is_projection = trained_by_muon(name) and not name.endswith(".bias")
        else:
            is_projection = any(part in PROJECTIONS for part in name.split("."))
        return cfg.lr_projections if is_projection else cfg.lr_dynamics

    return parameter_groups(mixers.named_parameters(), cfg.optimizer, cfg.weight_decay, rate)


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
        assert isinstance(module, Alignment)
        error = module.held_out_error()
        self.history.append((step, error))
        if error < self.error:
            self.error, self.step = error, step
            self.state = {k: v.detach().clone() for k, v in module.state_dict().items()}
