"""Aligning one layer with Lightning."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from tc.align.module import BestState, LayerAlignment
from tc.config import AlignConfig, InitConfig, ReadOut
from tc.init import relative_error, solve_read_out
from tc.init.layer import LARGEST_SEED
from tc.stats import LayerBatch
from tc.student.mixer import GatedDeltaNet
from tc.teacher.attention import Attention


@dataclass
class Aligned:
    """What an alignment reached, as relative errors on selection tokens.

    Attributes:
        before: of the state it started from.
        after: of the state that was kept.
        best_step: the steps behind the state that was kept.
        history: (step, error) at each look.
    """

    before: float
    after: float
    best_step: int
    history: list[tuple[int, float]]


def align_layer(
    mixer: GatedDeltaNet,
    attention: Attention,
    parts: dict[str, LayerBatch],
    cfg: AlignConfig,
    init: InitConfig,
    seed: int,
) -> Aligned:
    """Trains a mixer and leaves its best state in it.

    Layers are independent of each other: nothing but the arguments is read.

    Args:
        mixer: float32, changed in place.
        attention: the teacher's attention module, in float32.
        parts: the layer's activations, `calibration` and `selection`.
        cfg: steps, learning rates and the rest.
        init: where o_proj was solved in closed form, `cfg.resolve_read_out` solves it again.
        seed: of the order in which sequences are seen.

    Raises:
        TCError: if the loss is not finite.
    """
    selection = parts["selection"]
    best = BestState(cfg.check_every)
    module = LayerAlignment(mixer.requires_grad_(True), attention, selection, cfg)
    with _quiet_lightning():
        trainer = _trainer(cfg, best, mixer)
        try:
            trainer.fit(module, _loader(parts["calibration"], cfg, seed + mixer.layer_idx))
        except SystemExit as stop:
            # Lightning turns both signals into an exit, SIGTERM into one with status 0.
            raise KeyboardInterrupt from stop
        del trainer, module
        gc.collect()  # the two refer to each other, and hold a layer's activations
    mixer.load_state_dict(best.state)
    mixer.requires_grad_(False)
    after = best.error
    if cfg.resolve_read_out and init.read_out is ReadOut.ridge:
        after = _resolve(mixer, attention, parts, init.ridge, best)
    return Aligned(best.history[0][1], after, best.step, best.history)


def _resolve(
    mixer: GatedDeltaNet,
    attention: Attention,
    parts: dict[str, LayerBatch],
    strengths: list[float],
    best: BestState,
) -> float:
    """Solves the read-out for the trained features, and keeps it where it is better."""
    solve_read_out(mixer, attention, parts["calibration"], parts["selection"], strengths)
    error = relative_error(mixer, attention, parts["selection"])
    if error < best.error:
        return error
    mixer.load_state_dict(best.state)
    return best.error


def _loader(batch: LayerBatch, cfg: AlignConfig, seed: int) -> DataLoader:
    data = TensorDataset(batch.x, batch.context, batch.starts)
    order = torch.Generator().manual_seed(seed % LARGEST_SEED)
    return DataLoader(data, min(cfg.batch_sequences, len(data)), shuffle=True, generator=order)


def _trainer(cfg: AlignConfig, best: BestState, mixer: GatedDeltaNet) -> L.Trainer:
    on_gpu = mixer.A_log.is_cuda
    return L.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        max_steps=cfg.steps,
        max_epochs=-1,
        callbacks=[best],
        gradient_clip_val=cfg.gradient_clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Lightning greets and advises at every fit, which here is every layer."""
    loggers = [logging.getLogger(f"lightning.pytorch{s}") for s in ("", ".utilities.rank_zero")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec.*")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
