"""The stages of a run, in order: the only file that knows them all."""

from __future__ import annotations

import copy
import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as logging_of_transformers

from tc import __version__, ui
from tc.align import Walk, align_block, align_layer, blocks_of
from tc.artifacts import (
    Manifest,
    code_version,
    disk_errors,
    find,
    forget_unused,
    hash_of,
    load_tensors,
    read_manifest,
    replacing,
    require_space,
    save_tensors,
    touch,
    writing,
)
from tc.check import require_corpus, require_layers, validate
from tc.config import (
    STAGES,
    TIMED,
    Accelerator,
    Config,
    Measure,
    PolicyKind,
    RecoveryStageConfig,
    Strategy,
    question,
    science,
    typed,
)
from tc.curves import Curves, log_table, make_logger
from tc.data import (
    Document,
    Packed,
    evaluation_windows,
    load_splits,
    pack,
    packed_part,
    sequences_wanted,
    sources_digest,
    write_tokens,
    write_training,
)
from tc.errors import TCError
from tc.evaluate import (
    Result,
    Results,
    merged,
    perplexity,
    run_corpus,
    run_generation,
    run_positions,
    run_ruler,
    run_tasks,
    sources,
)
from tc.init import (
    form_of,
    fresh_mixer,
    initialise,
    needs_activations,
    relative_error,
    set_gate,
)
from tc.locks import locked
from tc.meter import Meter
from tc.plan import make_plan
from tc.policy import converted_layers, needs_all_mixers, num_kept, others, searches
from tc.recovery import (
    Stage,
    Watch,
    global_rank,
    load_weights,
    local_rank,
    read_weights,
    run_stage,
    student_of,
    watching,
)
from tc.report import (
    SELECTION_COLUMNS,
    draw_recovery,
    result_tables,
    selection_rows,
    show_plan,
    show_summary,
    summary_tables,
    write_selection,
)
from tc.run_folder import Pulse, RunFolder, alone, describe, forget_failure, write_failure
from tc.select import BypassLoss, HybridLoss, Loss, Round, SharedLosses, num_scores, search
from tc.stats import PARTS, Calibration, LayerBatch, calibrate
from tc.student.hybrid import build_student
from tc.student.mixer import GatedDeltaNet, MixerForm, mixer_state
from tc.student.saved import check_saved, load_saved
from tc.teacher import Teacher, load_teacher, read_geometry
from tc.teacher.attention import Attention
from tc.teacher.pretrained import folder_hash

log = logging.getLogger(__name__)

READS_TEXT = {Measure.perplexity, Measure.positions}
"""The measures that read the run's own held-out text."""

NOT_SPLIT = (
    *("eval.", "data.name", "data.sequence_length"),
    *("data.calibration_tokens", "data.selection_tokens"),
)
"""Keys that the documents of the evaluation part do not follow from."""

OF_A_STUDENT = (
    *("student/perplexity", "student/nll", "zero_shot/"),
    "copy_only/perplexity_over_student",
)
"""How the metrics begin that an evaluation of a student leaves."""

UNITS = {
    Measure.tasks: "answers",
    Measure.ruler: "prompts",
    Measure.positions: "tokens",
    Measure.corpus: "tokens",
    Measure.generation: "contexts",
}
"""What a measure's progress counts."""


def run(cfg: DictConfig, overrides: Sequence[str] = ()) -> float | None:
    """Checks a configuration, and runs its stages or only prices them.

    Args:
        cfg: as composed by Hydra.
        overrides: the command line, to find overrides that would be ignored.

    Returns:
        The student's perplexity, or None where it was not measured.

    Raises:
        TCError: for anything that the user can mend.
    """
    config = typed(cfg)
    validate(config, overrides)
    logging_of_transformers.disable_progress_bar()  # the run's own are enough
    geometry = read_geometry(config.teacher)
    require_layers(config, geometry)
    if config.dry_run:
        show_plan(OmegaConf.to_yaml(cfg, resolve=True), make_plan(config, geometry))
        return None
    require_corpus(config)
    rank, path = global_rank(config.trainer), Path(config.run_dir)
    if rank > 0:
        pulse = Pulse(path)
        pulse.wait()
        with ui.silent():
            return Pipeline(
                config, RunFolder.of_another(path), science(cfg), rank, pulse.listen
            ).run()
    if config.policy.worker > 0:
        return Pipeline(config, RunFolder.to_help(path, cfg), science(cfg)).run()
    several = config.trainer.devices * config.trainer.nodes > 1
    with alone(path, ui.say):
        folder = RunFolder(path, cfg, config.resume)
        handler = folder.log_to_file()
        try:
            with folder.alive() if several else nullcontext():
                value = Pipeline(config, folder, science(cfg), rank).run()
            # A sweep may have left word of a job that was refused while this run went on.
            forget_failure(folder.path)
            return value
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt):
                log.info("%s", error)
            write_failure(folder.path, describe(error, folder.stage))
            raise
        finally:
            logging.getLogger("tc").removeHandler(handler)
            handler.close()


class Pipeline:
    """One run: each stage finds its artifact in place, or makes it.

    Args:
        config: a valid configuration.
        folder: the open run folder.
        facts: the flat configuration that results follow from.
        rank: this process among those of a recovery on several devices. All but the first wait for
            what the first makes, take part in recovery alone, and write nothing of their own.
        still_there: asked while this process waits for the first; raises where that is gone.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        facts: dict[str, Any],
        rank: int = 0,
        still_there: Callable[[], object] = lambda: None,
    ) -> None:
        self.config, self.folder, self.facts, self.rank = config, folder, facts, rank
        self.cache = Path(config.paths.cache_dir).expanduser()
        self.metrics = folder.read_metrics()
        self.results: Results = folder.read_results()
        self._known: dict[Path, Manifest] = {}
        self._still_there = still_there
        self._told: set[tuple[str, int]] = set()
        self.shared: dict[str, Path] = {}
        self.device = _device(config)
        if config.trainer.threads:
            torch.set_num_threads(config.trainer.threads)
        _seed_everything(config.seed)

    def run(self) -> float | None:
        """Runs the stages that the configuration names, and reports."""
        ui.say(f"[bold]{self.folder.path}[/bold]")
        stages: dict[str, Callable[[], None]] = {
            "data": self.data,
            "calibrate": self.calibrate,
            "initialise": self.initialise,
            "align": self.align,
            "select": self.select,
            "blocks": self.blocks,
            "recover": self.recover,
            "student": self.student,
            "evaluate": self.evaluate,
        }
        order = _order(self.config.policy.kind)
        if self.rank:
            order = ["recover"]
        elif self.config.policy.worker:
            order = ["select"]
        try:
            for name in order:
                if name in self.config.stages:
                    log.info("stage %s", name)
                    self.folder.stage = name
                    stages[name]()
            if self.rank or self.config.policy.worker:
                return None
            self._report()
        except BaseException:
            if "logger" in vars(self) and self.logger is not None:
                with suppress(Exception):  # what ended the run is what is told
                    self.logger.finalize("failed")
            raise
        return self.metrics.get("student/perplexity")

    # ---- what the stages share -------------------------------------------------------------------

    @cached_property
    def teacher(self) -> Teacher:
        """The teacher, on the run's device."""
        ui.say(f"teacher: {self.config.teacher.name}")
        with Meter() as meter:
            teacher = load_teacher(self.config.teacher, self.cache, self._is_dealt_weights)
            if not self._is_dealt_weights:
                teacher.model.to(self.device)
        self._count("teacher", meter.facts())
        return teacher

    @property
    def _is_dealt_weights(self) -> bool:
        """Whether this process gets its share of all weights from the first one, and loads none."""
        return self.rank > 0 and self.config.trainer.strategy is Strategy.fsdp

    @cached_property
    def logger(self) -> Curves | None:
        """Where curves go; nowhere in any process but the first."""
        if self.rank:
            return None
        return make_logger(self.config.logger, self.folder.path, self.facts)

    @property
    def _num_layers(self) -> int:
        return self.teacher.geometry.num_hidden_layers

    @property
    def _converts(self) -> bool:
        """Whether any layer is converted, which is known before any is chosen."""
        if self.config.student.path:
            return False
        return num_kept(self.config.policy, self._num_layers) < self._num_layers

    @cached_property
    def converted(self) -> list[int]:
        """The layers that become Gated DeltaNet: none where a saved student is only measured.

        Raises:
            TCError: if they are yet to be searched for.
        """
        if self.config.student.path:
            return []
        policy = self.config.policy
        if searches(policy):
            found = self._require("select", self.path("select"), self._selection_made_by)
            return others(found.info["kept"], self._num_layers)
        return converted_layers(policy, self._num_layers)

    @property
    def candidates(self) -> list[int]:
        """The layers that get a mixer: those that are converted, or all where students compete."""
        if needs_all_mixers(self.config.policy):
            return list(range(self._num_layers))
        return self.converted

    @cached_property
    def form(self) -> MixerForm:
        """The form of the mixers."""
        attention = self.teacher.model.model.layers[0].self_attn
        return form_of(attention, self.config.student, self.config.trainer.backend.value)

    def attention(self, layer: int) -> Attention:
        """A copy of a teacher layer's attention module in float32."""
        return copy.deepcopy(self.teacher.model.model.layers[layer].self_attn).float()

    def path(self, *names: str) -> Path:
        """A path inside the run folder."""
        return self.folder.path.joinpath(*names)

    def _section(self, *groups: str) -> dict[str, Any]:
        return {k: v for k, v in self.facts.items() if k.split(".")[0] in groups}

    def _count(self, stage: str, facts: dict[str, Any]) -> None:
        for name in ("seconds", "peak_rss_bytes"):
            self.metrics[f"{stage}/{name}"] = facts[name]

    def _stage(
        self,
        stage: str,
        folder: Path,
        made_by: dict[str, Any],
        make: Callable[[Path], dict[str, Any]],
    ) -> Manifest:
        """Finds a stage's artifact, or makes it and measures that; counts it either way."""
        manifest, reused = self._artifact(folder, Manifest(stage, made_by), make)
        self._count(stage, manifest.info)
        self.metrics[f"{stage}/reused"] = reused
        return manifest

    def _artifact(
        self, folder: Path, wanted: Manifest, make: Callable[[Path], dict[str, Any]]
    ) -> tuple[Manifest, bool]:
        """The artifact at a folder, and whether it was there; of several runs one makes it."""
        found = self._find(folder, wanted)
        if found is not None:
            return found, True
        with self._alone(folder, wanted.kind):
            found = self._find(folder, wanted)  # another run may have made it in the meantime
            if found is None:
                with writing(folder, wanted) as fresh, _measured(wanted):
                    wanted.info.update(make(fresh))
                self._known[folder] = wanted
        return found or wanted, found is not None

    @contextmanager
    def _alone(self, folder: Path, stage: str) -> Iterator[None]:
        """Keeps other runs from making what they share with this one at the same time."""
        if not folder.is_relative_to(self.cache):
            yield
            return
        with disk_errors(folder.parent), locked(folder, stage.replace("_", " "), say=ui.say):
            yield

    def _find(self, folder: Path, wanted: Manifest) -> Manifest | None:
        """Looks for an artifact; gigabytes are hashed once a run, not at every use."""
        if folder not in self._known:
            found = find(folder, wanted)
            if found is None:
                return None
            self._known[folder] = found
        return self._known[folder]

    # ---- data ------------------------------------------------------------------------------------

    @cached_property
    def _data_made_by(self) -> dict[str, Any]:
        return {
            "teacher": self.teacher.identity,
            "sources": sources_digest(self.config.data),
            "code": code_version("data"),
            **self._section("data", "eval", "seed"),
        }

    def data(self) -> None:
        """Reads, splits, tokenises and packs the text."""

        def make(fresh: Path) -> dict[str, Any]:
            cfg = self.config
            return write_tokens(fresh, self.teacher.tokenizer, cfg.data, cfg.eval, cfg.seed)

        manifest = self._stage("data", self.path("data"), self._data_made_by, make)
        for name, value in manifest.info.items():
            if name.endswith("_tokens"):
                self.metrics[name] = value
        if self._stages_of_recovery:
            self.training_text()

    @cached_property
    def _training_made_by(self) -> dict[str, Any]:
        lengths = {
            name: [sequences_wanted(stage), stage.sequence_length]
            for name, stage in self._stages_of_recovery.items()
        }
        return {
            **{k: v for k, v in self._data_made_by.items() if not k.startswith("eval.")},
            "stages": lengths,
            "validation_tokens": self.config.recovery.validation_tokens,
        }

    @property
    def _training_folder(self) -> Path:
        return self.cache / "training" / hash_of(self._training_made_by)

    def training_text(self) -> None:
        """Packs what recovery trains on and is validated on, once for all runs that share it."""
        cfg, folder = self.config, self._training_folder
        lengths = self._training_made_by["stages"]

        def make(fresh: Path) -> dict[str, Any]:
            forget_unused(folder.parent, cfg.paths.cache_days)
            total = sum(number * length for number, length in lengths.values())
            require_space(fresh, 8 * total, "the training text")
            splits, tokenizer = load_splits(cfg.data, cfg.seed), self.teacher.tokenizer
            with ui.progress("training text", total) as advance:
                counts = write_training(
                    fresh, tokenizer, splits.parts["training"], lengths, cfg.seed, advance
                )
            packed = pack(
                splits.parts["selection"],
                tokenizer,
                cfg.data.sequence_length,
                cfg.recovery.validation_tokens,
                cfg.seed,
                "validation",
            )
            tensors = {"ids": packed.input_ids, "positions": packed.position_ids}
            save_tensors(fresh / "validation.safetensors", tensors)
            return counts

        manifest = self._stage("training_text", folder, self._training_made_by, make)
        touch(folder)
        self.shared["training text"] = folder
        for name in lengths:
            self.metrics[f"{name}_tokens"] = manifest.info[f"{name}_tokens"]

    @cached_property
    def tokens(self) -> dict[str, torch.Tensor]:
        """The run's token ids."""
        self._require("data", self.path("data"), self._data_made_by)
        return load_tensors(self.path("data", "tokens.safetensors"))

    @property
    def _packed(self) -> dict[str, Packed]:
        """The tokens that calibration and alignment see."""
        return {part: packed_part(self.tokens, part) for part in PARTS}

    def _require(self, stage: str, folder: Path, made_by: dict[str, Any]) -> Manifest:
        found = self._find(folder, Manifest(stage, made_by))
        while found is None and self.rank:  # the first process is about to make it
            self._still_there()
            time.sleep(1)
            found = self._find(folder, Manifest(stage, made_by))
        if found is None:
            advice = "run it first: add it to stages=[...], or leave stages= out."
            if self.config.policy.worker:
                advice = (
                    "begin with policy.worker=0 and otherwise the same settings; the others help "
                    "once it has come to select."
                )
            raise TCError(f"stage {stage} has left nothing in {folder}; {advice}")
        return found

    # ---- calibrate -------------------------------------------------------------------------------

    @cached_property
    def _calibration_made_by(self) -> dict[str, Any]:
        ids = {k: v for k, v in self.tokens.items() if not k.startswith("evaluation")}
        return {
            "teacher": self.teacher.identity,
            "tokens": _digest(ids),
            "code": code_version("stats"),
        }

    @property
    def _calibration_folder(self) -> Path:
        return self.cache / "calibrations" / hash_of(self._calibration_made_by)

    def calibrate(self) -> None:
        """Runs the teacher over the calibration tokens, once for all runs that share them."""
        makes_mixers = self._converts or needs_all_mixers(self.config.policy)
        if not needs_activations(self.config.init) or not makes_mixers:
            return
        parts = self._packed

        def make(fresh: Path) -> dict[str, Any]:
            forget_unused(folder.parent, self.config.paths.cache_days)
            total = sum(p.num_tokens for p in parts.values())
            with ui.progress("calibrate", total) as advance:
                return calibrate(self.teacher.model, parts, fresh, advance)

        folder = self._calibration_folder
        self._stage("calibrate", folder, self._calibration_made_by, make)
        touch(folder)
        self.shared["calibration"] = folder

    @cached_property
    def calibration(self) -> Calibration:
        """The finished calibration."""
        self._require("calibrate", self._calibration_folder, self._calibration_made_by)
        return Calibration(self._calibration_folder)

    def parts(self, layer: int) -> dict[str, LayerBatch]:
        """A layer's activations on the run's device, in float32."""
        return {p: b.to(self.device) for p, b in self.calibration.layer(layer).items()}

    # ---- initialise and align: layer by layer ----------------------------------------------------

    def _layers(
        self,
        stage: str,
        made_by: dict[str, Any],
        make: Callable[[int], tuple[GatedDeltaNet, dict[str, Any]]],
    ) -> None:
        """Makes the mixers that are not there yet, each an artifact of its own."""
        infos, reused = [], []

        def save(layer: int, fresh: Path) -> dict[str, Any]:
            mixer, info = make(layer)
            save_tensors(fresh / "mixer.safetensors", mixer_state(mixer))
            return info

        with ui.progress(stage, len(self.candidates), "layers") as advance:
            for layer in self.candidates:
                wanted = Manifest(stage, {**made_by, "layer": layer})
                folder = self._mixer_folder(stage, layer)
                manifest, found = self._artifact(folder, wanted, partial(save, layer))
                infos.append(manifest.info)
                reused.append(found)
                self._tell_errors(stage, layer, manifest)
                advance(1)
        if infos:
            self._summarise(stage, infos, all(reused))

    def _count_all(self, stage: str, infos: Sequence[dict[str, Any]], reused: bool) -> None:
        """Counts a stage of several parts: times add up, the peak is the highest."""
        seconds = sum(info["seconds"] for info in infos)
        peak = max(info["peak_rss_bytes"] for info in infos)
        self._count(stage, {"seconds": round(seconds, 3), "peak_rss_bytes": peak})
        self.metrics[f"{stage}/reused"] = reused

    def _summarise(self, stage: str, infos: list[dict[str, Any]], reused: bool) -> None:
        self._count_all(stage, infos, reused)
        errors = [info["error"] for info in infos if info.get("error") is not None]
        if errors:
            self.metrics[f"{stage}/relative_error"] = sum(errors) / len(errors)

    def _mixer_folder(self, stage: str, layer: int) -> Path:
        if stage == "blocks":
            return self.path("blocks", f"block_{self._block_of(layer)[0]:03d}")
        place = {"initialise": "init", "align": "align"}[stage]
        return self.path(place, f"layer_{layer:03d}")

    def mixer(self, stage: str, layer: int) -> GatedDeltaNet:
        """A layer's mixer as a stage left it.

        Raises:
            TCError: if the stage has not made it.
        """
        file = self._mixer_file(stage, layer)
        mixer = fresh_mixer(self.attention(layer), layer, self.form, self.config.seed)
        mixer.load_state_dict(load_tensors(file))
        return mixer

    def _mixer_file(self, stage: str, layer: int) -> Path:
        """Where a layer's mixer is, once the stage has made it."""
        folder = self._mixer_folder(stage, layer)
        if stage == "blocks":
            self._require(stage, folder, self._block_made_by(self._block_of(layer)))
            return folder / f"layer_{layer:03d}.safetensors"
        self._require(stage, folder, {**self._mixers_made_by(stage), "layer": layer})
        return folder / "mixer.safetensors"

    def _mixers_made_by(self, stage: str) -> dict[str, Any]:
        return {
            "initialise": self._init_made_by,
            "align": self._align_made_by,
            "blocks": self._blocks_made_by,
        }[stage]

    @cached_property
    def _init_made_by(self) -> dict[str, Any]:
        calibrated = needs_activations(self.config.init)
        section = self._section("init", "student", "seed")
        for ignored in ("init.name", "student.name", "student.path", "init.align"):
            section.pop(ignored)
        return {
            "teacher": self.teacher.identity,
            "form": self.form.to_dict(),
            "calibration": hash_of(self._calibration_made_by) if calibrated else None,
            "code": code_version("init"),
            **section,
        }

    def initialise(self) -> None:
        """Makes every mixer's start."""
        calibrated = needs_activations(self.config.init)

        def make(layer: int) -> tuple[GatedDeltaNet, dict[str, Any]]:
            attention = self.attention(layer)
            mixer = fresh_mixer(attention, layer, self.form, self.config.seed)
            if not calibrated:
                set_gate(mixer, attention, None, self.config.init)
                return mixer, {}
            parts = self.parts(layer)
            statistics = self.calibration.statistics(layer)
            info = initialise(mixer, attention, statistics, parts, self.config.init)
            error, health = _looked_at(layer, mixer, attention, parts["selection"])
            return mixer, {**info, "error": error, "health": health}

        self._layers("initialise", self._init_made_by, make)

    @cached_property
    def _align_made_by(self) -> dict[str, Any]:
        section = self._section("align")
        section.pop("align.name")
        own = {k: v for k, v in section.items() if not k.startswith("align.block_")}
        return {**self._init_made_by, **own, "code": code_version("align")}

    def align(self) -> None:
        """Aligns every mixer to its teacher layer."""
        if not self.config.init.align:
            return

        def make(layer: int) -> tuple[GatedDeltaNet, dict[str, Any]]:
            mixer = self.mixer("initialise", layer)
            attention, parts = self.attention(layer), self.parts(layer)
            result = align_layer(mixer, attention, parts, self.config.align, self.config.seed)
            log.info("layer %d: error %.4f -> %.4f", layer, result.before, result.after)
            _, health = _looked_at(layer, mixer, attention, parts["selection"])
            return mixer, {**asdict(result), "error": result.after, "health": health}

        self._layers("align", self._align_made_by, make)

    @property
    def _last_stage_of_layers(self) -> str:
        return "align" if self.config.init.align else "initialise"

    # ---- select: which layers keep attention -----------------------------------------------------

    @cached_property
    def _selection_text(self) -> Packed:
        """The selection tokens that layers are scored on, and no others."""
        packed = packed_part(self.tokens, "selection")
        rows = self.config.policy.tokens // packed.input_ids.shape[1]
        return Packed(packed.input_ids[:rows], packed.position_ids[:rows])

    @cached_property
    def _losses_made_by(self) -> dict[str, Any]:
        text = self._selection_text
        made_by = {
            "teacher": self.teacher.identity,
            "tokens": _digest({"ids": text.input_ids, "positions": text.position_ids}),
            "code": code_version("select"),
        }
        if not needs_all_mixers(self.config.policy):
            return made_by
        return {**made_by, "mixers": hash_of(self._mixers_made_by(self._last_stage_of_layers))}

    @cached_property
    def _selection_made_by(self) -> dict[str, Any]:
        policy = self.config.policy
        return {
            **self._losses_made_by,
            "kind": policy.kind.value,
            "count": num_kept(policy, self._num_layers),
        }

    def select(self) -> None:
        """Scores layers and chooses those that keep attention, where the policy searches."""
        policy = self.config.policy
        if not searches(policy):
            return
        folder = self.path("select")
        if policy.worker:
            ui.say(f"worker {policy.worker}: helps to score; the run goes on in worker 0")
            self._search()
            return
        manifest = self._stage("select", folder, self._selection_made_by, self._choose)
        self.shared["scores of layers"] = self._losses_folder
        info = manifest.info
        # Of all scores, whichever run and process made them.
        self.metrics["select/seconds"] = info["scores_seconds"]
        self.metrics["select/scores"] = info["scores"]
        self.metrics["select/policy"] = policy.name
        self.metrics["select/kept"] = ", ".join(map(str, info["kept"]))

    def _choose(self, fresh: Path) -> dict[str, Any]:
        losses, kept, rounds = self._search()
        log.info("layers that keep attention: %s", kept)
        write_selection(fresh, self.config.policy.kind, rounds, kept)
        return {
            "kept": kept,
            "scores": len(losses.facts),
            "scores_seconds": round(sum(facts["seconds"] for facts in losses.facts.values()), 3),
            "rows": selection_rows(rounds, kept),
        }

    def _search(self) -> tuple[SharedLosses, list[int], list[Round]]:
        """Runs the search over losses of this and of other processes and runs."""
        policy, layers = self.config.policy, self._num_layers
        count = num_kept(policy, layers)
        total = num_scores(policy.kind, layers, count)
        with ui.progress("select", total, "scores") as advance:
            losses = SharedLosses(
                self._losses_folder,
                self._losses_made_by,
                self._make_loss,
                policy.worker,
                policy.workers,
                advance,
            )
            return losses, *search(policy.kind, losses, layers, count)

    @property
    def _losses_folder(self) -> Path:
        return self.cache / "selections" / hash_of(self._losses_made_by)

    def _make_loss(self) -> Loss:
        model, text = self.teacher.model, self._selection_text
        if not needs_all_mixers(self.config.policy):
            return BypassLoss(model, text)
        stage = self._last_stage_of_layers
        return HybridLoss(model, {i: self.mixer(stage, i) for i in self.candidates}, text)

    # ---- blocks: consecutive converted layers, one block after another ---------------------------

    @cached_property
    def _blocks(self) -> list[list[int]]:
        return blocks_of(self.converted, self.config.align.block_layers)

    def _block_of(self, layer: int) -> list[int]:
        return next(block for block in self._blocks if layer in block)

    @cached_property
    def _blocks_made_by(self) -> dict[str, Any]:
        section = self._section("align")
        section.pop("align.name")
        return {**self._align_made_by, **section}

    def _block_made_by(self, block: list[int]) -> dict[str, Any]:
        # The stream in front of a block hangs on all blocks before it, and on how they were cut.
        before = [earlier for earlier in self._blocks if earlier[0] < block[0]]
        return {**self._blocks_made_by, "block": block, "blocks_before": before}

    def blocks(self) -> None:
        """Aligns block after block on the stream that the student has there."""
        if not self._has_blocks:
            return
        walk = Walk(self.teacher.model, self._packed)

        def make(block: list[int], fresh: Path) -> dict[str, Any]:
            streams = walk.reach(block[0])
            mixers = {layer: self.mixer("align", layer) for layer in block}
            result = align_block(
                self.teacher.model,
                mixers,
                streams,
                self.calibration.inputs(block[-1] + 1),
                self.config.align,
                self.config.seed,
            )
            log.info("block %s: error %.4f -> %.4f", block, result.before, result.after)
            for layer, mixer in mixers.items():
                save_tensors(fresh / f"layer_{layer:03d}.safetensors", mixer_state(mixer))
            return {**asdict(result), "error": result.after}

        infos, reused = [], []
        with ui.progress("blocks", len(self.converted), "layers") as advance:
            for block in self._blocks:
                folder = self._mixer_folder("blocks", block[0])
                wanted = Manifest("blocks", self._block_made_by(block))
                manifest, found = self._artifact(folder, wanted, partial(make, block))
                infos.append(manifest.info)
                reused.append(found)
                self._tell_errors("blocks", block[0], manifest)
                walk.mixers.update({layer: self.mixer("blocks", layer) for layer in block})
                advance(len(block))
        if infos:
            self._summarise("blocks", infos, all(reused))

    # ---- recover ---------------------------------------------------------------------------------

    @property
    def _stages_of_recovery(self) -> dict[str, RecoveryStageConfig]:
        """The stages that have something to train: none where no layer is converted."""
        return self.config.recovery.stages if self._converts else {}

    def _recovered_made_by(self, name: str) -> dict[str, Any]:
        """What a stage of recovery is made by: the stages before it, its recipe, its text."""
        own = {
            key: value
            for key, value in self._section("recovery").items()
            if key.startswith(f"recovery.{name}.")
        }
        before = self._stages_before(name)
        return {
            **self._zero_shot_made_by,
            **({"before": hash_of(self._recovered_made_by(before[-1]))} if before else {}),
            "text": hash_of(self._training_made_by),
            "precision": self.config.trainer.precision.value,
            "code": code_version("recovery"),
            **own,
        }

    def _recovered_folder(self, name: str) -> Path:
        return self.path("recover", name)

    def recover(self) -> None:
        """Distils the student, stage by stage."""
        infos, reused = [], []
        for name in self._stages_of_recovery:
            wanted = Manifest(f"recover {name}", self._recovered_made_by(name))
            done = self._recovered_folder(name) / "done"
            found = self._find(done, wanted)
            reused.append(found is not None)
            manifest = found or self._distil(name, wanted)
            self._known[done] = manifest
            infos.append(manifest.info)
            if found is not None:
                self._tell(name, manifest.info["history"])
        if infos and not self.rank:
            self._count_all("recover", infos, all(reused))

    def _distil(self, name: str, wanted: Manifest) -> Manifest:
        cfg, text = self.config.recovery, self._training_folder
        self._require("training_text", text, self._training_made_by)
        held_out = load_tensors(text / "validation.safetensors")
        stage = Stage(
            name=name,
            manifest=wanted,
            folder=self._recovered_folder(name),
            training=text / f"{name}.safetensors",
            validation=Packed(held_out["ids"], held_out["positions"]),
            seed=self.config.seed,
        )
        student = self._student_to_train(name)
        if not self.rank:
            # Weights and two moments of a checkpoint, and the weights of the finished stage.
            trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
            remedy = "Free some space, or choose another folder (run_dir=...)."
            require_space(stage.folder, 16 * trained, "a checkpoint of recovery", remedy)
        total = sequences_wanted(cfg.stages[name]) * cfg.stages[name].sequence_length
        with ui.progress(f"recover, {name}", total) as advance:
            watch = Watch(
                advance, lambda step, point: self._tell(name, [{"step": step, **point}]), ui.say
            )
            on_gpu = self.device.type == "cuda"
            manifest = run_stage(
                self.teacher.model, student, stage, cfg, self.config.trainer, on_gpu, watch
            )
        if self.config.trainer.strategy is Strategy.fsdp:
            del self.teacher  # it lies in shards now; the next use loads it anew
        else:
            self.teacher.model.to(self.device)  # from where Lightning has put it
        return manifest

    def _student_to_train(self, name: str) -> PreTrainedModel:
        """What a stage of recovery begins from; only its form where the weights come later."""
        cfg, precision = self.config.recovery, self.config.trainer.precision
        if self._is_dealt_weights:
            for layer in self.converted:  # until then the first process has no time for the others
                self._mixer_file(self._last_stage, layer)
            with torch.device("meta"):
                mixers = {
                    i: fresh_mixer(self.attention(i), i, self.form, self.config.seed)
                    for i in self.converted
                }
                return student_of(self.teacher.model, mixers, cfg, name, precision)
        if self.config.trainer.strategy is Strategy.fsdp:
            self.teacher.model.cpu()  # whole models have room there, a GPU for a share of them
        student = student_of(self.teacher.model, self._zero_shot_mixers(), cfg, name, precision)
        for earlier in self._stages_before(name):
            load_weights(student, self._recovered_weights(earlier))
        return student

    def _stages_before(self, name: str) -> list[str]:
        names = list(self._stages_of_recovery)
        return names[: names.index(name)]

    def _recovered_weights(self, name: str) -> dict[str, torch.Tensor]:
        """What a finished stage of recovery has trained, by name in the student."""
        folder = self._recovered_folder(name) / "done"
        manifest = self._require(f"recover {name}", folder, self._recovered_made_by(name))
        return read_weights(folder, manifest)

    def _tell(self, name: str, points: list[dict[str, Any]]) -> None:
        """Writes points of a stage's curves to the logger."""
        if self.logger is None:
            return
        for point in points:
            values = {f"recover/{name}/{k}": v for k, v in point.items() if k != "step"}
            self.logger.log_metrics(values, point["step"])
        self.logger.save()

    # ---- student ---------------------------------------------------------------------------------

    @property
    def _last_stage(self) -> str:
        return "blocks" if self._has_blocks else self._last_stage_of_layers

    @property
    def _has_blocks(self) -> bool:
        return self.config.init.align and self.config.align.block_steps > 0

    @cached_property
    def _zero_shot_made_by(self) -> dict[str, Any]:
        return {**self._mixers_made_by(self._last_stage), "layers": self.converted}

    def _zero_shot_mixers(self) -> dict[int, GatedDeltaNet]:
        return {i: self.mixer(self._last_stage, i) for i in self.converted}

    def zero_shot(self) -> PreTrainedModel:
        """The student before any recovery."""
        return self._assemble(self._zero_shot_mixers())

    @cached_property
    def _given_student(self) -> dict[str, Any]:
        """What the student of `student.path` is: the contents of its folder."""
        return {"student": folder_hash(Path(str(self.config.student.path)).expanduser())}

    @property
    def _student_made_by(self) -> dict[str, Any]:
        if self.config.student.path:
            return self._given_student
        names = list(self._stages_of_recovery)
        return self._recovered_made_by(names[-1]) if names else self._zero_shot_made_by

    def student(self) -> None:
        """Puts what was made into the teacher's model and saves it as a Hugging Face folder."""

        def make(fresh: Path) -> dict[str, Any]:
            return self._save(self._recovered(self._stages_of_recovery), fresh)

        self._stage("student", self.path("student"), self._student_made_by, make)

    def _recovered(self, stages: Iterable[str]) -> PreTrainedModel:
        """The student with what some stages of recovery have trained."""
        student = self.zero_shot()
        for name in stages:
            load_weights(student, self._recovered_weights(name))
        return student

    def _save(self, student: PreTrainedModel, folder: Path) -> dict[str, Any]:
        size = sum(p.numel() * p.element_size() for p in student.parameters())
        require_space(folder, size, "saving the student")
        student.save_pretrained(folder)
        self.teacher.tokenizer.save_pretrained(folder)
        return {"parameters": student.num_parameters()}

    def save_checkpoint_as_student(self, checkpoint: Path, output: Path) -> None:
        """Makes a Hugging Face folder of a checkpoint of this run, sharded or not.

        Raises:
            TCError: if it is none, is damaged, or is another run's; if there is something at
                `output`.
        """
        found = read_manifest(checkpoint)
        name = found.kind.split()[-1] if found else ""
        if found is None or name not in self._stages_of_recovery:
            raise TCError(f"{checkpoint} is no checkpoint of a recovery of {self.folder.path}.")
        find(checkpoint, Manifest(found.kind, self._recovered_made_by(name)))
        if output.exists():
            raise TCError(f"{output} exists; give a folder that does not.")
        student = self._recovered(self._stages_before(name))
        load_weights(student, read_weights(checkpoint, found))
        with replacing(output) as fresh:
            fresh.mkdir()
            self._save(student, fresh)

    def _assemble(self, mixers: dict[int, GatedDeltaNet]) -> PreTrainedModel:
        provenance = {
            "version": __version__,
            "teacher_name": self.config.teacher.name,
            "teacher": self.teacher.identity,
            "policy": self.config.policy.name,
            "init": self.config.init.name,
            "seed": self.config.seed,
        }
        return build_student(self.teacher.model, mixers, provenance)

    def load_student(self) -> PreTrainedModel:
        """The saved student, as a user would load it."""
        given = self.config.student.path
        if given:
            return load_saved(given, self.teacher.model.dtype).to(self.device)
        folder = self.path("student")
        self._require("student", folder, self._student_made_by)
        student = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
        return student.to(self.device).eval()

    def copy_only(self) -> PreTrainedModel:
        """The student that only copies the projections, for comparison."""
        mixers = {
            i: fresh_mixer(self.attention(i), i, self.form, self.config.seed)
            for i in self.converted
        }
        return self._assemble(mixers)

    # ---- evaluate --------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Measures the student, what it comes from and what it is compared with."""
        measures, given = self.config.eval.measures, self.config.student.path
        if given:
            check_saved(given, self.teacher.tokenizer)
            if READS_TEXT & set(measures):
                self.data()
        self._forget_another_student()
        student = cache(self.load_student)  # loaded when first needed, and once
        made: list[Manifest] = []
        for measure in measures:
            if measure is Measure.perplexity:
                manifests = self._perplexities(student)
            elif measure is Measure.generation:
                manifests = [self._generation(student)]
            else:
                manifests = self._scores(measure, student)
            for manifest in manifests:
                for name, found in manifest.info["results"].items():
                    results = [Result(**values) for values in found]
                    self.results = merged(self.results, {name: results})
            made += manifests
            self.folder.write_results(self.results)
        reused = all(self.metrics[f"{manifest.kind}/reused"] for manifest in made)
        self._count_all("evaluate", [manifest.info for manifest in made], reused)

    def _forget_another_student(self) -> None:
        """Drops what this folder tells of a student that has been made anew, or replaced, since."""
        key = hash_of(self._student_made_by)
        if self.metrics.get("student/made_by", key) != key:
            for name in ("student", "zero_shot"):
                self.results.pop(name, None)
            self.metrics = {k: v for k, v in self.metrics.items() if not k.startswith(OF_A_STUDENT)}
        self.metrics["student/made_by"] = key

    def _perplexities(self, student: Callable[[], PreTrainedModel]) -> list[Manifest]:
        """Teacher, copy_only student and this student on the same held-out windows."""
        common = {
            "windows": _digest({k: v for k, v in self.tokens.items() if "evaluation" in k}),
            "teacher": self.teacher.identity,
            "code": code_version("evaluate"),
        }
        models: dict[str, tuple[Callable[[], PreTrainedModel], Path, dict[str, Any]]] = {}
        folder = self._shared_evaluation("teacher", common)
        models["teacher"] = (self._teacher_model, folder, common)
        if not self.config.student.path:
            plain = {
                **common,
                "form": self.form.to_dict(),
                "layers": self.converted,
                "seed": self.config.seed,
            }
            folder = self._shared_evaluation("copy_only", plain)
            models["copy_only"] = (self.copy_only, folder, plain)
        if self._stages_of_recovery:
            made_by = {**self._zero_shot_made_by, **common}
            models["zero_shot"] = (self.zero_shot, self.path("evaluate", "zero_shot"), made_by)
        made_by = {**self._student_made_by, **common}
        models["student"] = (student, self.path("evaluate", "student"), made_by)
        found = {name: self._perplexity(name, *facts) for name, facts in models.items()}
        self._compare({name: manifest.info for name, manifest in found.items()})
        return list(found.values())

    def _shared_evaluation(self, name: str, made_by: dict[str, Any]) -> Path:
        """The folder of an evaluation that other runs need as well."""
        folder = self.cache / "evaluations" / hash_of(made_by)
        self.shared[f"evaluation of {name}"] = folder
        return folder

    def _teacher_model(self) -> PreTrainedModel:
        return self.teacher.model

    def _perplexity(
        self,
        name: str,
        model: Callable[[], PreTrainedModel],
        folder: Path,
        made_by: dict[str, Any],
    ) -> Manifest:
        kept, cfg = evaluation_windows(self.tokens), self.config.eval
        total = sum(int(w.counted.sum()) for w in kept)

        def make(_: Path) -> dict[str, Any]:
            with ui.progress(f"perplexity of {name}", total) as advance:
                found = perplexity(model(), kept, cfg.batch_sequences, advance)
            results = found.results("perplexity", "held_out", cfg.context)
            return {**found.to_dict(), "results": _plain({name: results})}

        return self._stage(f"evaluate_{name}", folder, made_by, make)

    def _compare(self, infos: dict[str, dict[str, Any]]) -> None:
        for name, info in infos.items():
            for key in ("perplexity", "nll", "nll_stderr"):
                self.metrics[f"{name}/{key}"] = info[key]
        ppl = {name: info["perplexity"] for name, info in infos.items()}
        self.metrics["student/perplexity_zero_shot"] = ppl.get("zero_shot", ppl["student"])
        self.metrics["student/perplexity_over_teacher"] = ppl["student"] / ppl["teacher"]
        if "copy_only" in ppl:
            self.metrics["copy_only/perplexity_over_student"] = ppl["copy_only"] / ppl["student"]
        self.metrics["evaluation_tokens"] = infos["student"]["tokens"]

    def _scores(self, measure: Measure, student: Callable[[], PreTrainedModel]) -> list[Manifest]:
        """Teacher and student by one measure, each an artifact of its own."""
        common = self._measured_by(measure)
        if measure is Measure.positions:
            data = {k: v for k, v in self._data_made_by.items() if not k.startswith(NOT_SPLIT)}
            common = {**data, **common}
        folder = self._shared_evaluation(f"teacher, {measure.value}", common)
        made_by = {**self._student_made_by, **common}
        own = self._measure_folder(measure, common) / "student"
        return [
            self._score(measure, "teacher", self._teacher_model, folder, common),
            self._score(measure, "student", student, own, made_by),
        ]

    def _measured_by(self, measure: Measure) -> dict[str, Any]:
        """What a measure's results of a teacher follow from, but for the text of a run."""
        cfg = self.config.eval
        return {
            "measure": measure.value,
            "teacher": self.teacher.identity,
            "seed": self.config.seed,
            "code": code_version("evaluate"),
            **question(cfg, measure),
            **sources(cfg, measure),
        }

    def _measure_folder(self, measure: Measure, made_by: dict[str, Any]) -> Path:
        """Where a measure's results lie: other settings have another folder, and both stay."""
        settings = {k: v for k, v in made_by.items() if k not in ("teacher", "code")}
        return self.path("evaluate", f"{measure.value}-{hash_of(settings)[:8]}")

    def _score(
        self,
        measure: Measure,
        name: str,
        model: Callable[[], PreTrainedModel],
        folder: Path,
        made_by: dict[str, Any],
    ) -> Manifest:
        cfg, seed, tokenizer = self.config.eval, self.config.seed, self.teacher.tokenizer

        def make(_: Path) -> dict[str, Any]:
            with ui.counting(f"{measure.value} of {name}", UNITS[measure]) as tell:
                if measure is Measure.tasks:
                    found = run_tasks(model(), tokenizer, cfg.tasks, seed, tell)
                elif measure is Measure.ruler:
                    found = run_ruler(model(), tokenizer, cfg.ruler, seed, tell)
                elif measure is Measure.positions:
                    texts = self._held_out
                    found = run_positions(model(), tokenizer, texts, cfg.positions, seed, tell)
                else:
                    found = run_corpus(model(), tokenizer, cfg.corpus, seed, tell)
            return {"results": _plain({name: found})}

        return self._stage(f"evaluate_{name}_{measure.value}", folder, made_by, make)

    @cached_property
    def _held_out(self) -> list[Document]:
        """The documents of the evaluation part."""
        return load_splits(self.config.data, self.config.seed).parts["evaluation"]

    def _generation(self, student: Callable[[], PreTrainedModel]) -> Manifest:
        """What generation costs; models that are compared are timed together, never apart."""
        machine = {"threads": torch.get_num_threads(), "device": _device_name(self.device)}
        common = {**self._measured_by(Measure.generation), **machine}

        def make(_: Path) -> dict[str, Any]:
            models = {"teacher": self.teacher.model, "student": student()}
            cfg = self.config.eval.generation
            with ui.counting("generation", UNITS[Measure.generation]) as tell:
                return {"results": _plain(run_generation(models, cfg, self.config.seed, tell))}

        folder = self._measure_folder(Measure.generation, common) / "teacher_and_student"
        made_by = {**self._student_made_by, **common}
        return self._stage("evaluate_generation", folder, made_by, make)

    # ---- report ----------------------------------------------------------------------------------

    def _report(self) -> None:
        seen = [name for name in TIMED if f"{name}/seconds" in self.metrics]
        seconds = sum(self.metrics[f"{name}/seconds"] for name in seen)
        peak = max(self.metrics[f"{name}/peak_rss_bytes"] for name in seen)
        self._count("total", {"seconds": round(seconds, 3), "peak_rss_bytes": peak})
        self.folder.write_metrics(self.metrics)
        self.folder.write_artifacts(self.shared)
        self._log_curves()
        histories = self._histories()
        if histories:
            draw_recovery(histories, self.metrics, self.path("recover", "curve.png"))
        show_summary(self.metrics, self.results, self.folder.path)

    def _histories(self) -> dict[str, list[dict[str, Any]]]:
        """The curves of the finished stages of recovery."""
        found = {}
        for name in self._stages_of_recovery if self._is_decided else ():
            wanted = Manifest(f"recover {name}", self._recovered_made_by(name))
            manifest = self._find(self._recovered_folder(name) / "done", wanted)
            if manifest is not None:
                found[name] = manifest.info["history"]
        return found

    @property
    def _selection(self) -> Manifest | None:
        return self._find(self.path("select"), Manifest("select", self._selection_made_by))

    @property
    def _is_decided(self) -> bool:
        """Whether it is known which layers are converted."""
        return not searches(self.config.policy) or self._selection is not None

    def _score_tables(self) -> list[tuple[str, list[str], list[list[Any]]]]:
        if not searches(self.config.policy) or self._selection is None:
            return []
        return [("scores of layers", SELECTION_COLUMNS, self._selection.info["rows"])]

    def _log_curves(self) -> None:
        assert self.logger is not None
        made = []
        if self.config.init.align and self._is_decided:
            made += [("align", i, {**self._align_made_by, "layer": i}) for i in self.candidates]
        if self._has_blocks and self._is_decided:
            made += [("blocks", block[0], self._block_made_by(block)) for block in self._blocks]
        for stage, first, made_by in made:
            manifest = self._find(self._mixer_folder(stage, first), Manifest(stage, made_by))
            if manifest is not None:
                self._tell_errors(stage, first, manifest)
        numbers = {k: v for k, v in self.metrics.items() if isinstance(v, int | float)}
        self.logger.log_metrics(numbers)
        self._log_results()
        tables = [*summary_tables(self.metrics, self.results), *result_tables(self.results)]
        for title, columns, rows in [*tables, *self._score_tables()]:
            log_table(self.logger, title, columns, rows)
        self.logger.finalize("success")

    def _tell_errors(self, stage: str, first: int, manifest: Manifest) -> None:
        """Writes the curve of an alignment to the logger, once."""
        if self.logger is None or (stage, first) in self._told:
            return
        self._told.add((stage, first))
        key = {"blocks": "first_layer"}.get(stage, "layer")
        history = manifest.info.get("history", [])
        for step, error in history:
            self.logger.log_metrics(
                {f"{stage}/{key}": first, f"{stage}/held_out_error": error}, step
            )
        if history:
            self.logger.save()

    def _log_results(self) -> None:
        """Gives the logger what was measured: as curves where it has positions, else as scalars."""
        assert self.logger is not None
        scalars: dict[str, float] = {}
        for model, found in self.results.items():
            for result in found:
                name = f"{model}/{result.name}"
                if result.position is None:
                    scalars[name] = result.value
                else:
                    self.logger.log_metrics({name: result.value}, result.position)
        if scalars:
            self.logger.log_metrics(scalars)


def _order(kind: PolicyKind) -> list[str]:
    """The stages in the order that a policy needs: a search in the teacher comes first."""
    if kind is not PolicyKind.ar:
        return list(STAGES)
    rest = [name for name in STAGES if name != "select"]
    return [rest[0], "select", *rest[1:]]


@contextmanager
def _measured(manifest: Manifest) -> Iterator[None]:
    """Puts wall time and peak memory of what it encloses into a manifest's info."""
    with Meter() as meter:
        yield
    manifest.info.update(meter.facts())


def _looked_at(
    layer: int, mixer: GatedDeltaNet, attention: Attention, batch: LayerBatch
) -> tuple[float, dict[str, float]]:
    """A mixer's relative error, and the health of its recurrence in the last pass of that."""
    with watching({layer: mixer}) as health:
        error = relative_error(mixer, attention, batch)
    return error, health[layer]


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    """Hash of tensors' names and contents."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + str(tuple(tensors[name].shape)).encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _plain(results: Results) -> dict[str, list[dict[str, Any]]]:
    """Results as they are kept in a manifest."""
    return {name: [result.to_dict() for result in found] for name, found in results.items()}


def _device_name(device: torch.device) -> str:
    """What times were taken on: a GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _device(config: Config) -> torch.device:
    """This process' own GPU where there is one, else the CPU."""
    if not _use_gpu(config):
        return torch.device("cpu")
    return torch.device("cuda", local_rank(config.trainer) % torch.cuda.device_count())


def _use_gpu(config: Config) -> bool:
    wanted = config.trainer.accelerator
    return wanted is not Accelerator.cpu and torch.cuda.is_available()


def _seed_everything(seed: int) -> None:
    """Every random choice has a generator of its own; this is for libraries that have none."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
