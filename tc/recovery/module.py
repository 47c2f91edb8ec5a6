"""The Lightning module of both stages: optimizer, schedule, and the guard of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tc.config import NonFinite, RecoveryConfig, RecoveryStageConfig
from tc.data import RankedSequences, TrainingTokens, steps_of
from tc.errors import TCError
from tc.optim import MuonAdamW, parameter_groups, rate_factor
from tc.recovery.checkpoint import any_of, local, mean, rank_and_world, trained
from tc.recovery.dealing import fill, shard
from tc.recovery.model import Distillation

MOST_SKIPS = 10
"""So many steps in a row may be skipped before the run stops."""


class Recovery(L.LightningModule):
    """Trains a student to be like its teacher.

    Args:
        distillation: teacher and student.
        name: of the stage, for messages.
        stage: lengths, rates and the rest.
        cfg: what a step that is not finite does.
        start: steps that were done before.
        data: the file of the training sequences, and the seed of their order.
        whole: under FSDP, `distillation` is `hollow`, and gets its values from this one.

    Attributes:
        losses: of the last optimizer step, means over its micro-batches on all devices.
        norm: of the last step's gradient before clipping.
        rate: its first learning rate.
        skipped: steps that were skipped.
        problem: what was wrong with the last step, or None.
    """

    def __init__(
        self,
        distillation: Distillation,
        name: str,
        stage: RecoveryStageConfig,
        cfg: RecoveryConfig,
        start: int,
        data: tuple[Path, int],
        whole: Distillation | None = None,
    ) -> None:
        super().__init__()
        self._whole = None if whole is None else [whole]  # in a list, as no part of this module
        self.distillation, self.stage, self.cfg = distillation, stage, cfg
        self.stage_name, self.start, self._data = name, start, data
        self.losses: dict[str, float] = {}
        self.norm = self.rate = math.nan
        self.problem: str | None = None
        self.skipped, self._skips_in_a_row = 0, 0
        self._parts: list[dict[str, torch.Tensor]] = []
        self._finite: dict[int, torch.Tensor] = {}

    @property
    def tokens_of_a_step(self) -> int:
        """Over all devices."""
        return self.stage.batch_sequences * self.stage.sequence_length

    def configure_model(self) -> None:
        """Under FSDP: from models of no memory to shards that have some."""
        if self._whole is None or self.device_mesh is None:
            return
        shard(self.distillation, self.device_mesh["data_parallel"])
        fill(self.distillation, self._whole[0], self.trainer.strategy.root_device)
        self._whole = None

    def train_dataloader(self) -> DataLoader:
        """This process' share of the sequences that are left."""
        rank, world = rank_and_world()
        data, batch = TrainingTokens(self._data[0]), self.stage.batch_sequences
        sampler = RankedSequences(len(data), batch, rank, world, self._data[1], self.start)
        return DataLoader(data, self.stage.micro_sequences or batch // world, sampler=sampler)

    def configure_optimizers(self) -> Any:
        """Mixers and the rest with their own rates; a schedule in tokens."""
        stage, mixers = self.stage, {id(p) for m in self._mixers for p in m.parameters()}
        parameters = trained(self.distillation.student)

        def rate(name: str) -> float:
            if id(parameters[name]) in mixers:
                return stage.lr_mixers
            lr: float = getattr(stage, "lr_rest", 0.0)
            return lr

        groups = parameter_groups(parameters.items(), stage.optimizer, stage.weight_decay, rate)
        optimizer = MuonAdamW(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @property
    def _mixers(self) -> list[torch.nn.Module]:
        return list(self.distillation.mixers.values())

    def _factor(self, step: int) -> float:
        size, stage = self.tokens_of_a_step, self.stage
        total = steps_of(stage) * size
        done = (self.start + step) * size
        return rate_factor(
            stage.schedule, done, total, stage.warmup_tokens, stage.decay_share, size
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        """The loss of a micro-batch of (ids, positions), both `[B, T]`."""
        found = self.distillation(*batch)
        self._parts.append({name: value.detach() for name, value in found.items()})
        for layer, finite in self.distillation.finite.items():
            self._finite[layer] = self._finite.get(layer, finite) & finite
        loss = found["loss"]
        # An infinite loss may have a finite gradient; made NaN, it is seen by every process.
        return loss * torch.where(loss.isfinite(), 1.0, math.nan)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clips the gradient of a step, and takes it away where it is not finite.

        Raises:
            TCError: where a step is not finite and `non_finite=stop`, or for too many in a row.
        """
        names = self._parts[0]
        parts = [torch.stack([part[name].float() for name in names]) for part in self._parts]
        means = mean(torch.stack(parts).mean(0))
        self.losses = dict(zip(names, means.tolist(), strict=True))
        self._parts.clear()
        self.rate, self.problem = optimizer.param_groups[0]["lr"], None
        outputs, self._finite = self._finite, {}
        parameters = trained(self.distillation.student)
        limit = self.stage.gradient_clip or math.inf
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(gradients.values())
        self.norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(self.norm):
            torch.nn.utils.clip_grads_with_norm_(parameters.values(), limit, norm)
            self._skips_in_a_row = 0
            return
        self._skips_in_a_row += 1
        self.skipped += 1
        self.problem = self._what_is_wrong(outputs, gradients)
        for parameter in parameters.values():
            parameter.grad = None
        if self.cfg.non_finite is NonFinite.stop or self._skips_in_a_row >= MOST_SKIPS:
            raise TCError(self.problem)

    def _what_is_wrong(
        self, outputs: dict[int, torch.Tensor], gradients: dict[str, torch.Tensor]
    ) -> str:
        """What is not finite, and where that began; every process must call it.

        Args:
            outputs: whether what each layer said is finite.
            gradients: by name, in the order of the forward pass.
        """
        losses = [name for name, value in self.losses.items() if not math.isfinite(value)]
        layers = [layer for layer, bad in _bad(outputs, lambda finite: ~finite).items() if bad]
        if layers:
            where = f"{', '.join(losses)}, first in the output of layer {layers[0]}"
        elif losses:
            where = ", ".join(losses)
        else:
            # The backward pass goes from the last to the first.
            bad = _bad(gradients, lambda gradient: ~local(gradient).isfinite().all())
            names = [name for name, is_bad in bad.items() if is_bad]
            where = f"the gradient alone, of {len(names)} of {len(bad)} parameters"
            where += f", first that of {names[-1]}" if names else ": their norm is too large"
        step = self.start + self.global_step + 1  # as checkpoints and curves count
        row = f", {self._skips_in_a_row} steps in a row" if self._skips_in_a_row > 1 else ""
        return (
            f"recovery.{self.stage_name}: not finite at step {step}{row}: {where}. The last "
            f"checkpoint is intact. Try a smaller recovery.{self.stage_name}.lr_mixers"
            " or a longer warmup_tokens"
            + (", or recovery.non_finite=skip." if self.cfg.non_finite is NonFinite.stop else ".")
        )


def _bad(
    tensors: Mapping[Any, torch.Tensor], is_bad: Callable[[torch.Tensor], torch.Tensor]
) -> dict[Any, bool]:
    """Which tensors are bad on any process, in order; the same names on all."""
    if not tensors:
        return {}
    flags = any_of(torch.stack([is_bad(tensor) for tensor in tensors.values()]))
    return dict(zip(tensors, flags.tolist(), strict=True))
