"""One stage of recovery, from its last checkpoint to its end."""

from __future__ import annotations

import copy
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from tc.artifacts import Manifest
from tc.config import Precision, RecoveryConfig, RecoveryStageConfig, Strategy, TrainerConfig
from tc.data import Packed, steps_of
from tc.meter import Meter
from tc.quiet import fit, quiet_lightning
from tc.recovery.checkpoint import (
    Found,
    agree,
    discard,
    latest,
    read_weights,
    restore_optimizer,
    state_tensors,
    trained,
    write,
)
from tc.recovery.dealing import hollow, is_hollow
from tc.recovery.health import watching
from tc.recovery.model import Distillation
from tc.recovery.module import Recovery
from tc.signals import Interrupted, interrupt, listening, name_of
from tc.student.hybrid import build_student
from tc.student.mixer import GatedDeltaNet

POINTS = 500
"""So many points of the loss curve are kept at most."""


class Stopped(Interrupted):
    """A signal came; a checkpoint was written, and the same command goes on from there."""


@dataclass
class Watch:
    """What a stage tells while it runs.

    Attributes:
        tokens: told how many tokens each step has trained on, and at first how many were done.
        point: told each point of the curves: step, and values by name.
        say: told what a person should know.
    """

    tokens: Callable[[int], None] = lambda tokens: None
    point: Callable[[int, dict[str, float]], None] = lambda step, values: None
    say: Callable[[str], None] = lambda text: None


@dataclass
class Stage:
    """What is trained, on what, and where it is kept.

    Attributes:
        name: `stage1` or `stage2`.
        manifest: kind and making of the finished stage; checkpoints have the same making.
        folder: of its checkpoints.
        training: training sequences.
        validation: packed sequences that perplexity is measured on.
        seed: of the order of the training sequences.
    """

    name: str
    manifest: Manifest
    folder: Path
    training: Path
    validation: Packed
    seed: int

    @property
    def checkpoint(self) -> Manifest:
        """A fresh manifest for a checkpoint."""
        return Manifest(f"checkpoint of {self.name}", self.manifest.made_by)


def student_of(
    teacher: PreTrainedModel,
    mixers: dict[int, GatedDeltaNet],
    cfg: RecoveryConfig,
    name: str,
    precision: Precision,
) -> PreTrainedModel:
    """A student whose trained parameters are its own, in float32, and require a gradient.

    What is not trained stays the teacher's memory, but for a teacher in half precision whose
    student computes in float32.

    Args:
        teacher: stays as it is.
        mixers: in float32.
        cfg: stage 2 with `lr_rest` above 0 trains the rest too.
        name: of the stage.
        precision: what the student computes in.
    """
    exact = {layer: copy.deepcopy(mixer) for layer, mixer in mixers.items()}
    student = build_student(teacher, copy.deepcopy(mixers), {})
    for layer, mixer in exact.items():
        student.model.layers[layer].self_attn = mixer.float().requires_grad_(True)
    trains_all = name == "stage2" and cfg.stage2.lr_rest > 0
    widens = precision is Precision.float32 and teacher.dtype != torch.float32
    if trains_all or widens:
        own_all(student)
        student.float()
    if trains_all:
        student.requires_grad_(True)
        # Behind the last stream that a loss looks at; DDP waits for the gradient of all it trains.
        if not (cfg.stage2.kl or cfg.stage2.ce) and not is_tied(student):
            student.lm_head.requires_grad_(False)
    return student


def is_tied(student: PreTrainedModel) -> bool:
    """Whether the head is the embeddings."""
    return student.lm_head.weight is student.model.embed_tokens.weight


def own_all(student: PreTrainedModel) -> None:
    """Gives a student copies of every weight that it shares with its teacher."""
    shared: dict[int, torch.nn.Parameter] = {}
    mixers = {id(p) for mixer in student.mixers.values() for p in mixer.parameters()}
    for module in student.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in mixers:
                continue
            fresh = shared.setdefault(
                id(parameter),
                torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad),
            )
            setattr(module, name, fresh)


def run_stage(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    stage: Stage,
    cfg: RecoveryConfig,
    trainer: TrainerConfig,
    on_gpu: bool,
    watch: Watch,
) -> Manifest:
    """Trains a student, and writes what was trained to `stage.folder / "done"`.

    Args:
        teacher: in evaluation mode.
        student: of `student_of`; trained in place. Under FSDP neither it nor the teacher is of any
            more use, and in all processes but the first both may be on the meta device.
        stage: what on, and where.
        cfg: the recipe.
        trainer: devices, strategy and precision.
        on_gpu: whether there is one and it is wanted.
        watch: who is told what.

    Returns:
        The manifest of the finished stage: `info["history"]` has its curves.

    Raises:
        TCError: if the loss stays not finite, or a checkpoint cannot be written.
        Stopped: by a signal, after a checkpoint.
    """
    own = cfg.stages[stage.name]
    found = latest(stage.folder, stage.checkpoint, watch.say)
    start = 0 if found is None else found[1].info["step"]
    if found is not None:
        if not is_hollow(student):
            load_weights(student, read_weights(*found))
        watch.say(f"recovery {stage.name} continues at step {start} of {steps_of(own)}")

    def distillation(teacher: PreTrainedModel, student: PreTrainedModel) -> Distillation:
        terms = cfg.stage2 if stage.name == "stage2" else None
        return Distillation(teacher, student, terms, cfg.kl_backend, cfg.activation_checkpointing)

    both, whole = distillation(teacher, student), None
    if trainer.strategy is Strategy.fsdp:
        # Apart, for what they share is sharded apart as well.
        both, whole = distillation(hollow(teacher), hollow(student)), both
    data = (stage.training, stage.seed)
    module = Recovery(both, stage.name, own, cfg, start, data, whole)
    conductor = Conductor(stage, cfg, found, watch)
    conductor.replay(module)
    with quiet_lightning(), listening(conductor.on_signal), conductor.meter:
        fitter = make_trainer(trainer, on_gpu, own, steps_of(own) - start, conductor)
        fit(fitter, module)
    student.requires_grad_(False)
    if conductor.stopped:
        # Lightning's launcher kills the first process once another has ended with a status above 0.
        raise Stopped(conductor.signal) if fitter.is_global_zero else SystemExit(0)
    return conductor.done


@torch.no_grad()
def load_weights(student: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    """Puts trained weights into a student, by name; the teacher's memory stays as it is."""
    parameters = dict(student.named_parameters())
    for name, value in weights.items():
        own = parameters[name]
        own.data = value.to(own.device, own.dtype)  # a copy would go to the teacher's memory


def make_trainer(
    cfg: TrainerConfig,
    on_gpu: bool,
    stage: RecoveryStageConfig,
    steps: int,
    conductor: L.Callback,
) -> L.Trainer:
    """A trainer without Lightning's own checkpoints, bars and samplers."""
    world = cfg.devices * cfg.nodes
    backend = None if on_gpu else "gloo"
    strategies: dict[Strategy, Callable[[], Any]] = {
        Strategy.single: lambda: "auto",
        Strategy.ddp: lambda: DDPStrategy(
            process_group_backend=backend,
            gradient_as_bucket_view=True,  # one copy of the gradients and not two
        ),
        Strategy.fsdp: lambda: ModelParallelStrategy(world, 1, process_group_backend=backend),
    }
    micro = stage.micro_sequences or stage.batch_sequences // world
    precisions: dict[Precision, Any] = {
        Precision.float32: "32-true",
        Precision.bfloat16: "bf16-mixed",
    }
    return L.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        strategy=strategies[cfg.strategy](),
        devices=cfg.devices,
        num_nodes=cfg.nodes,
        precision=precisions[cfg.precision],
        accumulate_grad_batches=stage.batch_sequences // (world * micro),
        max_steps=steps,
        max_epochs=1,
        min_epochs=0,
        callbacks=[conductor],
        plugins=_environment(cfg),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _environment(cfg: TrainerConfig) -> list[Any]:
    """Who starts the processes; and that Lightning requeues no job, for this room saves it."""
    if cfg.strategy is Strategy.single:
        return [LightningEnvironment()]
    return [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []


class Conductor(L.Callback):
    """What happens between the steps: curves, validation, checkpoints, signals.

    Args:
        stage: what is trained, and where it is kept.
        cfg: how often.
        found: the checkpoint that is gone on from, or None.
        watch: who is told what.

    Attributes:
        signal: the number of one that this process got, or 0.
        stopped: whether a signal ended the stage early, here or in another process.
        done: the manifest of the finished stage.
        history: every point of the curves so far.
    """

    def __init__(
        self, stage: Stage, cfg: RecoveryConfig, found: Found | None, watch: Watch
    ) -> None:
        self.stage, self.cfg, self.found, self.watch = stage, cfg, found, watch
        self.history: list[dict[str, Any]] = [] if found is None else found[1].info["history"]
        self.stopped, self.meter = False, Meter()
        self._before = {} if found is None else found[1].info
        self.done = stage.manifest
        own = cfg.stages[stage.name]
        self._total = steps_of(own)
        self._looks = milestones(self._total, cfg.validations)
        size = own.batch_sequences * own.sequence_length
        self._size, self._interval = size, max(1, cfg.checkpoint_tokens // size)
        self.signal = 0
        self._clock = 0.0

    def replay(self, module: Recovery) -> None:
        """Tells what was done before, and goes on counting from there."""
        module.skipped = self._before.get("skipped", 0)
        self.watch.tokens(module.start * self._size)
        for point in self.history:
            self._tell(point)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Keeps a signal for the next step's end; a Ctrl-C after that stops at once.

        Slurm sends a job that it preempts two signals or three: no second one means haste.
        """
        if self.signal and number == signal.SIGINT:
            interrupt(number, frame)
        self.signal = number

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Takes up the optimizer's state, and measures the start."""
        assert isinstance(pl_module, Recovery)
        both = pl_module.distillation
        both.eval()
        if self.cfg.activation_checkpointing and self.stage.name == "stage2":
            both.student.gradient_checkpointing_enable({"use_reentrant": False})
            both.student.train()  # which is where `transformers` recomputes
        if self.found is not None:
            parameters = trained(both.student)
            restore_optimizer(*self.found, parameters, trainer.optimizers[0])
        if not self.history:
            self._validate(pl_module, 0)
        self._clock = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object
    ) -> None:
        """After an optimizer step: a point of the curve, and what is due."""
        module = pl_module
        assert isinstance(module, Recovery)
        if trainer.fit_loop._should_accumulate():
            return
        step = module.start + trainer.global_step
        self.watch.tokens(self._size)
        if module.problem:
            self.watch.say(f"skipped a step: {module.problem}")
        self._point(module, step)
        last = step == self._total
        if step in self._looks or last:
            self._validate(module, step)
        if last:
            self._save(trainer, module, step)
            self.stopped = agree(self.signal > 0)  # the stage is whole, the run is not
        elif agree(self.signal > 0):
            self.watch.say(f"{name_of(self.signal)} came: saving a checkpoint at step {step}")
            self._save(trainer, module, step)
            self.stopped = trainer.should_stop = True
        elif step % self._interval == 0:
            self._save(trainer, module, step)
        self._clock = time.perf_counter()

    def _point(self, module: Recovery, step: int) -> None:
        if step % max(1, self._total // POINTS) and step != self._total:
            return
        seconds = time.perf_counter() - self._clock
        self._add(
            step,
            {
                **module.losses,
                "gradient_norm": module.norm,
                "learning_rate": module.rate,
                "skipped_steps": module.skipped,
                "tokens_per_second": self._size / seconds,
            },
        )

    def _add(self, step: int, values: dict[str, float]) -> None:
        point = {"step": step, "tokens": step * self._size, **values}
        self.history.append(point)
        self._tell(point)

    def _tell(self, point: dict[str, Any]) -> None:
        self.watch.point(point["step"], {k: v for k, v in point.items() if k != "step"})

    @torch.no_grad()
    def _validate(self, module: Recovery, step: int) -> None:
        """Perplexity of both on the validation tokens, and the health of the recurrences."""
        both, packed = module.distillation, self.stage.validation
        was_training = both.student.training
        both.student.eval()
        sums = {"teacher": 0.0, "student": 0.0, "tokens": 0.0}
        with watching(both.mixers) as health:
            for ids, positions in zip(
                packed.input_ids.split(1), packed.position_ids.split(1), strict=True
            ):
                with module.trainer.precision_plugin.forward_context():
                    found = both(ids.to(module.device), positions.to(module.device), "nll")
                for name, value in found.items():
                    sums[name] += float(value)
        both.student.train(was_training)
        if isinstance(both, FSDPModule):
            both.reshard()  # after a forward pass alone, embeddings and head are left whole
        ppl = {name: _exp(sums[name] / sums["tokens"]) for name in ("teacher", "student")}
        values = {
            "perplexity": ppl["student"],
            "perplexity_over_teacher": ppl["student"] / ppl["teacher"],
        }
        for layer, facts in health.items():
            values |= {f"health/{name}/layer_{layer}": value for name, value in facts.items()}
        self._add(step, values)
        self.watch.say(
            f"recovery {self.stage.name}: {step * self._size:,} tokens, validation perplexity "
            f"{ppl['student']:,.2f} ({ppl['student'] / ppl['teacher']:.3f} x teacher)"
        )

    def _save(self, trainer: L.Trainer, module: Recovery, step: int) -> None:
        parameters = trained(module.distillation.student)
        facts = self.meter.facts()
        info = {
            "step": step,
            "history": self.history,
            "skipped": module.skipped,
            "seconds": round(self._before.get("seconds", 0) + facts["seconds"], 3),
            "peak_rss_bytes": max(self._before.get("peak_rss_bytes", 0), facts["peak_rss_bytes"]),
        }
        if step == self._total:
            self.done.info.update(info)
            write(self.stage.folder / "done", self.done, state_tensors(parameters, None))
            discard(self.stage.folder, None, keep=0)
            return
        manifest = self.stage.checkpoint
        manifest.info.update(info)
        tensors = state_tensors(parameters, trainer.optimizers[0])
        newest = self.stage.folder / f"step_{step:07d}"
        write(newest, manifest, tensors)
        discard(self.stage.folder, newest, self.cfg.keep_checkpoints)


def _exp(x: float) -> float:
    """Infinite where it is too large for a float, as it is for a student gone astray."""
    return math.inf if x > 700 else math.exp(x)


def milestones(total: int, looks: int) -> set[int]:
    """Steps from 1 to the total, log spaced."""
    if looks < 1:
        return set()
    return {round(total ** (i / looks)) for i in range(looks + 1)}
