"""One loader for every kind of teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tc.artifacts import MANIFEST, read_json
from tc.config import GeometryConfig, TeacherConfig, TeacherSource
from tc.errors import TCError, one_message
from tc.teacher.convertible import check_convertible
from tc.teacher.embedded import embedded_path
from tc.teacher.geometry import check_agrees, count_parameters, empty_model, geometry_of
from tc.teacher.gguf_config import config_of
from tc.teacher.gguf_convert import convert_gguf
from tc.teacher.gguf_file import open_gguf
from tc.teacher.pretrained import load_pretrained, pretrained_config, pretrained_identity
from tc.teacher.untrained import byte_tokenizer, random_config, random_identity, random_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, str]]


@dataclass
class Teacher:
    """A loaded softmax-attention model that the student can follow.

    Attributes:
        model: on the CPU, in evaluation mode, without gradients, with `sdpa` attention.
        tokenizer: its tokenizer; no id of it is beyond the model's embeddings.
        geometry: the model's sizes.
        identity: what its weights are, for the keys of artifacts: the hash of a GGUF file and the
            converter's version, or the hash of a folder, or hub id and commit, or architecture,
            fields and seed of a random one; and the dtype.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    geometry: GeometryConfig
    identity: dict[str, str]


def read_geometry(cfg: TeacherConfig) -> GeometryConfig:
    """The sizes of a teacher, without loading weights.

    Returns:
        `cfg.geometry` where it is stated; else what the teacher's own configuration says.

    Raises:
        TCError: if the teacher cannot be found or read.
    """
    if cfg.geometry is not None:
        return cfg.geometry
    cfg = _unpacked(cfg)
    if cfg.source is TeacherSource.gguf:
        file = open_gguf(_gguf_path(cfg))
        return geometry_of(config_of(file), file.parameters)
    hf = cfg.source is TeacherSource.hf
    config = pretrained_config(cfg) if hf else random_config(cfg)
    check_convertible(config)
    return _geometry(config)


def load_teacher(cfg: TeacherConfig, cache_dir: Path, empty: bool = False) -> Teacher:
    """Loads a teacher.

    Whether it can be converted, and whether its sizes are the stated ones, is found out from its
    configuration first: before weights are downloaded, read or drawn.

    Args:
        cfg: which teacher, and its dtype.
        cache_dir: where converted GGUF files are kept.
        empty: only its form, on the meta device: no weight is read, and none has memory.

    Raises:
        TCError: if it cannot be found, read or converted, or is not what `cfg` describes.
    """
    loaders: dict[TeacherSource, Callable[[TeacherConfig, Path, bool], Loaded]] = {
        TeacherSource.gguf: _load_gguf,
        TeacherSource.hf: _load_hf,
        TeacherSource.random: _load_random,
    }
    cfg = _unpacked(cfg)
    model, tokenizer, identity = loaders[cfg.source](cfg, Path(cache_dir), empty)
    model.eval().requires_grad_(False)
    check_convertible(model)
    geometry = geometry_of(model.config, count_parameters(model))
    check_agrees(cfg, geometry)
    _check_vocabulary(cfg, model, tokenizer)
    _check_finite(cfg, model)
    return Teacher(model, tokenizer, geometry, {**identity, "dtype": cfg.dtype.value})


def _geometry(config: PreTrainedConfig) -> GeometryConfig:
    return geometry_of(config, count_parameters(empty_model(config)))


def _approve(cfg: TeacherConfig, config: PreTrainedConfig) -> None:
    check_convertible(config)
    if cfg.geometry is not None:
        check_agrees(cfg, _geometry(config))


def _unpacked(cfg: TeacherConfig) -> TeacherConfig:
    """An embedded teacher as the file or the folder that its package holds."""
    if cfg.source is not TeacherSource.embedded:
        return cfg
    path = embedded_path(cfg)
    source = TeacherSource.hf if path.is_dir() else TeacherSource.gguf
    return replace(cfg, source=source, path=str(path))


def _gguf_path(cfg: TeacherConfig) -> Path:
    if not cfg.path:
        raise TCError(f"teacher {cfg.name!r} has no path; give a file with teacher.path=/....gguf.")
    return Path(cfg.path).expanduser()


def _load_gguf(cfg: TeacherConfig, cache_dir: Path, empty: bool) -> Loaded:
    folder = convert_gguf(_gguf_path(cfg), cache_dir, cfg.sha256)
    # From here on it is a local folder like any other, known by the hash of its GGUF file.
    local = replace(cfg, source=TeacherSource.hf, path=str(folder.resolve()))
    config = pretrained_config(local)
    _approve(cfg, config)
    made_by = read_json(folder / MANIFEST)["made_by"]
    identity = {key: str(value) for key, value in made_by.items()}
    return *load_pretrained(local, config, empty), identity


def _load_hf(cfg: TeacherConfig, cache_dir: Path, empty: bool) -> Loaded:
    config = pretrained_config(cfg)
    _approve(cfg, config)
    return *load_pretrained(cfg, config, empty), pretrained_identity(cfg, config)


def _load_random(cfg: TeacherConfig, cache_dir: Path, empty: bool) -> Loaded:
    config = random_config(cfg)
    _approve(cfg, config)
    return random_model(cfg, config, empty), byte_tokenizer(), random_identity(cfg)


def _check_finite(cfg: TeacherConfig, model: PreTrainedModel) -> None:
    """Refuses weights that would make every result NaN, once hours have gone by."""
    # The extremes need no memory of a tensor's size, and a NaN is one of them.
    bad = [
        f"{name} is not finite: it has NaN or infinite values in {cfg.dtype.value}"
        for name, parameter in model.named_parameters()
        if parameter.numel()
        and not parameter.is_meta
        and not all(x.isfinite() for x in parameter.aminmax())
    ]
    if bad:
        heading = f"the weights of teacher {cfg.name!r} ({cfg.path}) are damaged, or too large for "
        heading += f"teacher.dtype={cfg.dtype.value}; get them again, or take teacher.dtype=float32"
        raise one_message(bad[:20], f"{heading}:")


def _check_vocabulary(
    cfg: TeacherConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest < 0:
        raise TCError(
            f"teacher {cfg.name!r} ({cfg.path}) has a tokenizer without tokens. Take the tokenizer "
            "of this very model."
        )
    if highest >= rows:
        raise TCError(
            f"teacher {cfg.name!r} ({cfg.path}): the tokenizer has ids up to {highest}, but the "
            f"model has {rows} embeddings; they do not belong together. Take the tokenizer of this "
            "very model."
        )
