"""Aligning one layer, or one block of layers, with Lightning."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import PreTrainedModel

from tc.align.module import Alignment, BestState, BlockAlignment, LayerAlignment
from tc.config import AlignConfig
from tc.init.layer import LARGEST_SEED
from tc.quiet import fit, quiet_lightning
from tc.stats import LayerBatch
from tc.student.mixer import GatedDeltaNet
from tc.teacher.attention import Attention
from tc.teacher.stream import Stream

SLOWER = 1 / 4
"""What learning rates are multiplied by where no step was better than none."""


@dataclass
class Aligned:
    """What an alignment reached, as relative errors on selection tokens.

    Attributes:
        before: of the state it started from.
        after: of the state that was kept.
        best_step: the steps behind the state that was kept.
        history: (step, error) at each look of the last try.
        rate: what the learning rates were multiplied by in the last try.
    """

    before: float
    after: float
    best_step: int
    history: list[tuple[int, float]]
    rate: float


def align_layer(
    mixer: GatedDeltaNet,
    attention: Attention,
    parts: dict[str, LayerBatch],
    cfg: AlignConfig,
    seed: int,
) -> Aligned:
    """Trains a mixer and leaves its best state in it.

    Layers are independent of each other: nothing but the arguments is read.

    Args:
        mixer: float32, changed in place.
        attention: the teacher's attention module, in float32.
        parts: the layer's activations, `calibration` and `selection`.
        cfg: steps, learning rates and the rest.
        seed: of the order in which sequences are seen.

    Raises:
        TCError: if the loss is not finite.
    """
    batch = parts["calibration"]
    data = TensorDataset(batch.x, batch.context, batch.starts)

    def module(cfg: AlignConfig) -> Alignment:
        return LayerAlignment(mixer, attention, parts["selection"], cfg)

    return _tried(module, data, cfg, seed + mixer.layer_idx)


def align_block(
    model: PreTrainedModel,
    mixers: dict[int, GatedDeltaNet],
    streams: dict[str, Stream],
    targets: dict[str, torch.Tensor],
    cfg: AlignConfig,
    seed: int,
) -> Aligned:
    """Trains the mixers of consecutive layers together and leaves their best state in them.

    Args:
        model: the teacher.
        mixers: of consecutive layers, by layer, float32, changed in place.
        streams: the student's stream in front of the first of them, `calibration` and `selection`.
        targets: what the teacher's layer behind them reads, by the same names.
        cfg: `block_steps`, `block_lr_projections`, `block_lr_dynamics` and the rest.
        seed: of the order in which sequences are seen.

    Raises:
        TCError: if the loss is not finite.
    """
    first, behind = min(mixers), max(mixers) + 1
    last = behind == len(model.model.layers)
    norm = model.model.norm if last else model.model.layers[behind].input_layernorm
    layers = [decoder_layer(model, i, mixer) for i, mixer in sorted(mixers.items())]
    own = replace(
        cfg,
        steps=cfg.block_steps,
        lr_projections=cfg.block_lr_projections,
        lr_dynamics=cfg.block_lr_dynamics,
    )
    norm = copy.deepcopy(norm).float()
    data = TensorDataset(torch.arange(len(streams["calibration"])))

    def module(cfg: AlignConfig) -> Alignment:
        return BlockAlignment(list(mixers.values()), layers, norm, streams, targets, cfg)

    return _tried(module, data, own, seed + first)


def decoder_layer(model: PreTrainedModel, layer: int, mixer: GatedDeltaNet) -> nn.Module:
    """A teacher's decoder layer in float32 with a mixer for its attention."""
    fresh = copy.deepcopy(model.model.layers[layer]).float().requires_grad_(False)
    fresh.self_attn = mixer
    return fresh


def _tried(
    module: Callable[[AlignConfig], Alignment], data: TensorDataset, cfg: AlignConfig, seed: int
) -> Aligned:
    """Trains until some step makes the mixers better, at most `cfg.tries` times.

    A learning rate is a step's size whatever the size of what it changes. Where a layer says
    little, or its weights are small, every step can be too far; no other layer need go slower.

    Args:
        module: from settings to the mixers' training, which begins at what they are.
        data: what is seen.
        cfg: of the first try.
        seed: of the order in which it is seen.
    """
    for number in range(cfg.tries):
        rate = SLOWER**number
        own = replace(
            cfg, lr_projections=cfg.lr_projections * rate, lr_dynamics=cfg.lr_dynamics * rate
        )
        best = _fit(module(own), data, own, seed)
        if best.step > 0:
            break
    return Aligned(best.history[0][1], best.error, best.step, best.history, rate)


def _fit(module: Alignment, data: TensorDataset, cfg: AlignConfig, seed: int) -> BestState:
    """Trains a module's mixers, and leaves their best state in them."""
    best = BestState(cfg.check_every)
    module.mixers.requires_grad_(True)
    with quiet_lightning():
        trainer = _trainer(cfg, best, next(module.parameters()).is_cuda)
        fit(trainer, module, _loader(data, cfg, seed))
        module.load_state_dict(best.state)
        module.mixers.requires_grad_(False)
        del trainer, module
        gc.collect()  # the two refer to each other, and hold a layer's activations
    return best


def _loader(data: TensorDataset, cfg: AlignConfig, seed: int) -> DataLoader:
    order = torch.Generator().manual_seed(seed % LARGEST_SEED)
    return DataLoader(data, min(cfg.batch_sequences, len(data)), shuffle=True, generator=order)


def _trainer(cfg: AlignConfig, best: BestState, on_gpu: bool) -> L.Trainer:
    return L.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        plugins=[LightningEnvironment()],  # as many processes as a Slurm job has are recovery's
        max_steps=cfg.steps,
        max_epochs=-1,
        callbacks=[best],
        gradient_clip_val=cfg.gradient_clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
