"""What a configuration would do and cost, before anything is loaded."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

import torch

from tc.config import Accelerator, Config, GeometryConfig, Measure, Precision, Strategy
from tc.evaluate.ruler import MADE as RULER
from tc.init import needs_activations
from tc.policy import kept_layers, needs_all_mixers, num_kept, searches
from tc.recovery import KL_ROWS
from tc.select import num_scores
from tc.student.mixer import GatedDeltaNet, MixerForm

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

PROGRAM_BYTES = 900_000_000
"""Python with torch and transformers, and what allocators hold on to; measured on a CPU."""


@dataclass
class Plan:
    """A priced configuration.

    Attributes:
        geometry: the teacher's sizes.
        num_kept: how many layers keep attention.
        kept: which ones, or None where the policy is yet to search for them.
        scores: how many models the search scores.
        mixer_parameters: of one mixer, in FLA's form.
        student_parameters: of the whole student.
        memory_bytes: estimated peak of the stages that use one device.
        recovery: estimated cost of each stage of recovery.
        disk_bytes: estimated size of what is written.
        flops: estimated arithmetic.
        seconds: estimated wall time at the speed of this machine's matrix products, or None where
            the wanted device is not here.
    """

    geometry: GeometryConfig
    num_kept: int
    kept: list[int] | None
    scores: int
    mixer_parameters: int
    student_parameters: int
    memory_bytes: int
    recovery: dict[str, RecoveryCost]
    disk_bytes: int
    flops: float
    seconds: float | None

    @property
    def recovery_bytes(self) -> int | None:
        """Estimated peak of recovery on each device, or None without one."""
        return max((cost.memory.total for cost in self.recovery.values()), default=None)

    @property
    def loading_bytes(self) -> int | None:
        """Estimated peak while recovery's models are made, or None without a recovery."""
        return max((cost.loading_bytes for cost in self.recovery.values()), default=None)


def make_plan(config: Config, geometry: GeometryConfig) -> Plan:
    """Prices a configuration for a teacher of the given sizes."""
    policy, layers = config.policy, geometry.num_hidden_layers
    kept = layers if config.student.path else num_kept(policy, layers)
    converted = layers - kept
    searched = searches(policy) and converted > 0
    mixer = mixer_parameters(geometry, config.student.use_gate)
    student = geometry.parameters + converted * (mixer - attention_parameters(geometry))
    flops = _flops(config, geometry, converted, mixer)
    rate = matmul_rate(config)
    return Plan(
        geometry=geometry,
        num_kept=kept,
        kept=_kept(config, layers),
        scores=num_scores(policy.kind, layers, kept) if searched else 0,
        mixer_parameters=mixer,
        student_parameters=student,
        memory_bytes=_memory(config, geometry, student, mixer),
        recovery=recovery_costs(config, geometry, converted * mixer),
        disk_bytes=_disk(config, geometry, student, converted, mixer),
        flops=flops,
        seconds=None if rate is None else flops / rate,
    )


def _kept(config: Config, num_layers: int) -> list[int] | None:
    """The layers that keep attention, all where a saved student is only measured."""
    if config.student.path:
        return list(range(num_layers))
    return None if searches(config.policy) else kept_layers(config.policy, num_layers)


def mixer_parameters(geometry: GeometryConfig, use_gate: bool) -> int:
    """Parameters of one mixer."""
    with torch.device("meta"):
        mixer = GatedDeltaNet(
            geometry.hidden_size,
            geometry.num_attention_heads,
            geometry.head_dim,
            0,
            MixerForm(use_gate=use_gate),
        )
    return sum(p.numel() for p in mixer.parameters())


def attention_parameters(geometry: GeometryConfig) -> int:
    """Weights of one attention module, without biases and norms."""
    heads = 2 * (geometry.num_attention_heads + geometry.num_key_value_heads)
    return heads * geometry.head_dim * geometry.hidden_size


def _context(geometry: GeometryConfig) -> int:
    return geometry.num_attention_heads * geometry.head_dim


def _has_blocks(config: Config) -> bool:
    return config.init.align and config.align.block_steps > 0


def _with_mixer(config: Config, geometry: GeometryConfig) -> int:
    """How many layers get a mixer: of these, a search may keep some."""
    layers = geometry.num_hidden_layers
    kept = 0 if needs_all_mixers(config.policy) else num_kept(config.policy, layers)
    return layers - kept


def _selection_tokens(config: Config) -> int:
    return min(config.policy.tokens, config.data.selection_tokens)


def _tokens(config: Config) -> int:
    return config.data.calibration_tokens + config.data.selection_tokens


def _memory(config: Config, geometry: GeometryConfig, student: int, mixer: int) -> int:
    """The largest of what aligning a layer, aligning a block and evaluating the student hold."""
    size = BYTES[config.teacher.dtype.value]
    teacher = geometry.parameters * size
    widths = geometry.hidden_size + _context(geometry)
    activations = 4 * _tokens(config) * widths * 2  # as read, and in float32
    # Weights, gradient, two moments and the best state, in float32; a batch's intermediates.
    training = 4 * 5 * mixer + 4 * config.align.batch_sequences * config.data.sequence_length * (
        12 * widths
    )
    evaluating = student * size + 4 * _tokens_at_once(config) * 8 * geometry.hidden_size
    layer = geometry.parameters // geometry.num_hidden_layers
    # The same of each mixer, the layers in float32, the stream and its target, and intermediates.
    batch = config.align.batch_sequences * config.data.sequence_length
    block = 4 * 2 * _tokens(config) * geometry.hidden_size + config.align.block_layers * 4 * (
        5 * mixer + layer + 30 * batch * geometry.hidden_size
    )
    stages = [evaluating]
    if config.student.path:
        return PROGRAM_BYTES + teacher + evaluating
    if needs_activations(config.init):
        stages.append(activations + training)
    if _has_blocks(config):
        stages.append(block)
    if searches(config.policy):
        stages.append(_selecting(config, geometry, mixer * size))
    return PROGRAM_BYTES + teacher + max(stages)


def _selecting(config: Config, geometry: GeometryConfig, mixer_bytes: int) -> int:
    """Streams in front of every layer, mixers in the teacher's dtype, a chunk of logits."""
    layers = geometry.num_hidden_layers
    streams = 4 * _selection_tokens(config) * geometry.hidden_size * (layers + 2)
    logits = 4 * 3 * KL_ROWS * geometry.vocab_size
    mixers = mixer_bytes * layers if needs_all_mixers(config.policy) else 0
    return streams + logits + mixers


def _tokens_at_once(config: Config) -> int:
    """The most tokens of a forward pass of an evaluation."""
    cfg = config.eval
    sizes = {
        Measure.perplexity: cfg.batch_sequences * cfg.context,
        Measure.tasks: cfg.tasks.batch_size * QUESTION,
        Measure.ruler: cfg.ruler.batch_size * max(cfg.ruler.lengths, default=0),
        Measure.positions: max(cfg.positions.batch_tokens, *cfg.positions.contexts),
        Measure.corpus: cfg.corpus.batch_sequences * cfg.corpus.context,
        Measure.generation: max(cfg.generation.contexts, default=0),
    }
    return max(sizes[measure] for measure in cfg.measures)


QUESTION = 512
"""Tokens of a question of lm-eval, with its examples: a guess."""

CORPUS = 300_000
"""Tokens of WikiText-2's test text, about."""


def _evaluation_flops(config: Config, geometry: GeometryConfig) -> float:
    """Forward passes over what is measured; but for tasks of lm-eval, whose length is not known."""
    cfg, generation = config.eval, config.eval.generation
    perplexities = 2 if config.student.path else 3 + bool(config.recovery.stages)
    readings = generation.repeats + generation.warm_up
    tokens = {
        Measure.perplexity: perplexities * cfg.tokens,
        Measure.tasks: 0,
        Measure.ruler: 2 * sum(cfg.ruler.lengths) * cfg.ruler.limit * len(cfg.ruler.tasks or RULER),
        Measure.positions: 2 * cfg.positions.tokens * len(cfg.positions.contexts),
        Measure.corpus: 2 * (cfg.corpus.tokens or CORPUS),
        Measure.generation: 2 * readings * sum(generation.contexts),
    }
    return 2.0 * geometry.parameters * sum(tokens[measure] for measure in cfg.measures)


TRAINED_BYTES = 16
"""Of a trained parameter: itself, its gradient and AdamW's two moments, in float32."""

WIDTHS = 40
"""Numbers a token and layer that the backward pass keeps, in multiples of the model's width."""


@dataclass
class RecoveryMemory:
    """Bytes that one process of recovery holds at its peak, by what they are for.

    Attributes:
        program: Python and its libraries, where there is no device of its own.
        frozen: weights that are not trained, teacher's and student's.
        trained: weights, gradients and the optimizer's moments, in float32.
        gathered: weights that FSDP makes whole for a while, and their whole gradients.
        activations: what the backward pass keeps.
        logits: chunks of the KL divergence.
    """

    program: int
    frozen: int
    trained: int
    gathered: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass
class RecoveryCost:
    """What a stage of recovery costs.

    Attributes:
        memory: of each process.
        loading_bytes: while teacher and student are made whole: of every process on its device, or
            under FSDP of the first one alone, in main memory, before it deals them.
        step_tokens: of an optimizer step, over all devices.
        step_flops: arithmetic of a step on each device.
        step_traffic_bytes: what each device sends in a step, and as much is received.
    """

    memory: RecoveryMemory
    loading_bytes: int
    step_tokens: int
    step_flops: float
    step_traffic_bytes: int

    def tokens_per_second(self, flops: float, bytes_per_second: float) -> float:
        """A bound, over all devices: arithmetic and traffic as if neither waited for the other.

        Args:
            flops: operations a second of a device.
            bytes_per_second: that a device sends.
        """
        traffic = self.step_traffic_bytes / bytes_per_second
        return self.step_tokens / max(self.step_flops / flops, traffic)


def recovery_costs(
    config: Config, geometry: GeometryConfig, mixers: int
) -> dict[str, RecoveryCost]:
    """What each stage of recovery costs; nothing where a saved student is only measured.

    Args:
        config: strategy, devices, precision and the recipe.
        geometry: of the teacher.
        mixers: parameters of all mixers.
    """
    if config.student.path:
        return {}
    return {name: _recovery_cost(config, geometry, mixers, name) for name in config.recovery.stages}


def _recovery_cost(
    config: Config, geometry: GeometryConfig, mixers: int, name: str
) -> RecoveryCost:
    stage, trainer = config.recovery.stages[name], config.trainer
    world = trainer.devices * trainer.nodes
    micro = stage.micro_sequences or -(-stage.batch_sequences // world)
    rest = _trains_rest(config, name)
    flops = _passes(name, rest) * 2 * geometry.parameters
    tokens = stage.batch_sequences * stage.sequence_length
    return RecoveryCost(
        memory=_recovery_memory(config, geometry, mixers, name, micro * stage.sequence_length),
        loading_bytes=_loading(config, geometry, mixers, rest),
        step_tokens=tokens,
        step_flops=flops * tokens / world,
        step_traffic_bytes=_traffic(
            config, geometry, mixers, name, -(-stage.batch_sequences // (world * micro))
        ),
    )


def _recovery_memory(
    config: Config, geometry: GeometryConfig, mixers: int, name: str, tokens: int
) -> RecoveryMemory:
    """Of a process that has `tokens` of a micro-batch."""
    trainer, recovery = config.trainer, config.recovery
    shards = _shards(config)
    rest = _trains_rest(config, name)
    size = BYTES[config.teacher.dtype.value]
    width = 2 if trainer.precision is Precision.bfloat16 else 4
    layers, hidden = geometry.num_hidden_layers, geometry.hidden_size
    trained = _trained(config, geometry, name, mixers)
    # Frozen weights are the teacher's own memory, but for FSDP, which holds them twice.
    frozen = geometry.parameters * size * (2 if shards > 1 and not rest else 1)
    gathered = 0
    if shards > 1:
        tables = 2 * geometry.vocab_size * hidden  # embeddings and head, whole for a whole step
        layer = geometry.parameters // layers
        # The layer at work and the one that is fetched meanwhile, of both models.
        gathered = (size + 4) * (tables + 2 * layer) + (4 * (tables + layer) if rest else 0)
    kept = WIDTHS if not recovery.activation_checkpointing else 1
    activations = width * tokens * hidden * (layers * kept + WIDTHS)
    return RecoveryMemory(
        program=_program(config),
        frozen=frozen // shards,
        trained=TRAINED_BYTES * trained // shards,
        gathered=gathered,
        activations=activations,
        logits=4 * 4 * KL_ROWS * geometry.vocab_size if name == "stage2" else 0,
    )


def _program(config: Config) -> int:
    """Of the program, where it shares the memory that is spoken of."""
    trainer = config.trainer
    on_gpu = trainer.accelerator is Accelerator.gpu or trainer.strategy is not Strategy.single
    return 0 if on_gpu and trainer.accelerator is not Accelerator.cpu else PROGRAM_BYTES


def _shards(config: Config) -> int:
    """Among how many devices each model is dealt."""
    trainer = config.trainer
    return trainer.devices * trainer.nodes if trainer.strategy is Strategy.fsdp else 1


def _trains_rest(config: Config, name: str) -> bool:
    return name == "stage2" and config.recovery.stage2.lr_rest > 0


def _loading(config: Config, geometry: GeometryConfig, mixers: int, rest: bool) -> int:
    """Teacher and student as they are made, before anything is dealt.

    The mixers are there twice in float32: as they are handed over, and as the student's own.
    """
    size = BYTES[config.teacher.dtype.value]
    own = geometry.parameters * (4 if rest else size if _shards(config) > 1 else 0)
    return _program(config) + geometry.parameters * size + own + 2 * 4 * mixers


def _traffic(
    config: Config, geometry: GeometryConfig, mixers: int, name: str, micro_batches: int
) -> int:
    """Bytes that each device sends in a step, by rings: all but one part of what is moved.

    FSDP gathers both models' weights once a micro-batch, the student's once more for the backward
    pass (and again where it recomputes is the same gathering), and scatters gradients; DDP sums
    them once a step.
    """
    world = config.trainer.devices * config.trainer.nodes
    trained = 4 * _trained(config, geometry, name, mixers)
    if world == 1:
        return 0
    if config.trainer.strategy is Strategy.ddp:
        return 2 * trained * (world - 1) // world
    size = BYTES[config.teacher.dtype.value]
    teacher = geometry.parameters * size
    frozen = 0 if _trains_rest(config, name) else teacher
    # Stage 1 runs the student's mixers alone.
    student = trained + (frozen if name == "stage2" else 0)
    return micro_batches * (teacher + 2 * student + trained) * (world - 1) // world


def _disk(
    config: Config, geometry: GeometryConfig, student: int, converted: int, mixer: int
) -> int:
    if config.student.path:
        return 0
    size = BYTES[config.teacher.dtype.value]
    width = geometry.hidden_size + _context(geometry)
    captured = geometry.num_hidden_layers * _tokens(config) * width * size
    made = _with_mixer(config, geometry) * (1 + config.init.align) + converted * _has_blocks(config)
    saved = student * size + 4 * made * mixer + _checkpoints(config, geometry, converted * mixer)
    return saved + (captured if needs_activations(config.init) else 0)


def _checkpoints(config: Config, geometry: GeometryConfig, mixers: int) -> int:
    """The checkpoints of the larger stage, one more while it is written, and each one's weights."""
    trained = [_trained(config, geometry, name, mixers) for name in config.recovery.stages]
    kept = config.recovery.keep_checkpoints + 1
    return 12 * kept * max(trained, default=0) + 4 * sum(trained)


def _trained(config: Config, geometry: GeometryConfig, stage: str, mixers: int) -> int:
    """Parameters that a stage of recovery trains."""
    return mixers + (geometry.parameters if _trains_rest(config, stage) else 0)


def _passes(stage: str, rest: bool) -> float:
    """Forward passes that a step's arithmetic is worth: teacher's, student's, and its backward."""
    return 2 + (2.0 if stage == "stage2" and rest else 1.2)


def _flops(config: Config, geometry: GeometryConfig, converted: int, mixer: int) -> float:
    """Multiply-adds count twice; attention scores and the recurrence are left out."""
    align, data = config.align, config.data
    evaluate = _evaluation_flops(config, geometry)
    if config.student.path:
        return evaluate
    select, made = _selection_flops(config, geometry), _with_mixer(config, geometry)
    if not needs_activations(config.init):
        return float(evaluate + select + _recovery_flops(config, geometry))
    calibrate = 2 * geometry.parameters * _tokens(config)
    passes = 3 * _tokens(config)  # gate, features for the read-out, the error
    gram = 2 * _context(geometry) * (_context(geometry) + geometry.hidden_size) * _tokens(config)
    initialise = made * (2 * mixer * passes + gram)
    steps = align.steps * align.batch_sequences * data.sequence_length
    checks = (align.steps // align.check_every + 2) * data.selection_tokens
    train = made * 2 * mixer * (3 * steps + checks) if config.init.align else 0
    layers = 2 * geometry.parameters * converted / geometry.num_hidden_layers
    block_steps = align.block_steps * align.batch_sequences * data.sequence_length
    block_checks = (align.block_steps // align.check_every + 2) * data.selection_tokens
    # The stream goes once through all layers; a step needs no gradient of the teacher's weights.
    blocks = calibrate + layers * (2.5 * block_steps + block_checks) if _has_blocks(config) else 0
    return float(
        evaluate
        + calibrate
        + initialise
        + train
        + select
        + blocks
        + _recovery_flops(config, geometry)
    )


def _selection_flops(config: Config, geometry: GeometryConfig) -> int:
    """A score runs half of the layers on average, and the head; the teacher's too for a KL."""
    policy, layers = config.policy, geometry.num_hidden_layers
    if not searches(policy):
        return 0
    head = geometry.vocab_size * geometry.hidden_size
    heads = 2 if needs_all_mixers(policy) else 1
    each = 2 * _selection_tokens(config) * (geometry.parameters // 2 + heads * head)
    return num_scores(policy.kind, layers, num_kept(policy, layers)) * each


def _recovery_flops(config: Config, geometry: GeometryConfig) -> float:
    """Teacher forward, and student forward and backward; half of the latter for frozen weights."""
    total = 0.0
    for name, stage in config.recovery.stages.items():
        passes = _passes(name, _trains_rest(config, name))
        looks = (config.recovery.validations + 2) * 2 * config.recovery.validation_tokens
        total += 2 * geometry.parameters * (passes * stage.tokens + looks)
    return total


def matmul_rate(config: Config) -> float | None:
    """Floating-point operations per second that a float32 matrix product reaches here.

    Half of it is taken: norms, the recurrence and small products run slower than large ones. None
    where the configuration wants a GPU and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if config.trainer.accelerator is Accelerator.gpu and not has_gpu:
        return None
    use_gpu = has_gpu and config.trainer.accelerator is not Accelerator.cpu
    x = torch.ones(1024, 1024, device="cuda" if use_gpu else "cpu")
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        float((x @ x)[0, 0])  # reading a value waits for the device
        best = min(best, time.perf_counter() - start)
    return 0.5 * 2 * 1024**3 / best
