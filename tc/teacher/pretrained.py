"""Teachers in Hugging Face's own form: a local folder, or a model id on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from tc.artifacts import hash_file, hash_of, parse_json
from tc.config import TeacherConfig
from tc.errors import TCError, one_message
from tc.network import offline_if_unreachable
from tc.teacher.convertible import size_problems
from tc.teacher.geometry import empty_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
UNREACHABLE = {
    *("LocalEntryNotFoundError", "OfflineModeIsEnabled"),
    *("TransportError", "ConnectionError"),  # of httpx, timeouts too, and of Python
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
AGAIN = "make or download it again."
FLOATS = ("F64", "F32", "BF16", "F16")
"""How safetensors calls the types that weights may have."""


def is_local(path: str) -> bool:
    """Whether a teacher's path means this machine. What looks like a path is never sent out."""
    looks = path in (".", "..") or path.startswith(("/", "./", "../", "~"))
    return looks or Path(path).exists()


def source_of(cfg: TeacherConfig) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` is given for a teacher, and where it may look.

    Raises:
        TCError: if there is no path, or it is a local one that holds no model.
    """
    if not cfg.path:
        raise TCError(
            f"teacher {cfg.name!r} has no path; give a local folder or a hub id, such as "
            "teacher.path=Qwen/Qwen2.5-1.5B."
        )
    # Code from a repository is never run.
    if not is_local(cfg.path):
        return cfg.path, {"revision": cfg.revision or "main", "trust_remote_code": False}
    folder = Path(cfg.path).expanduser()
    _check_folder(folder)
    return str(folder), {"local_files_only": True, "trust_remote_code": False}


def _check_folder(folder: Path) -> None:
    if folder.is_file():
        raise TCError(f"{folder} is a file; give its folder, or teacher.source=gguf for a GGUF.")
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise TCError(
            f"{folder} {what}; teacher.path must be a folder that save_pretrained or "
            "`hf download` wrote, or a hub id."
        )
    if (folder / ADAPTER).is_file():
        # Transformers would follow it to whatever base model it names, on the hub too.
        raise TCError(
            f"{folder} has an adapter ({ADAPTER}), not a model alone; merge the two "
            "(merge_and_unload, save_pretrained) and give that folder."
        )
    for name in SETTINGS:
        if (folder / name).is_file() and not isinstance(parse_json(folder / name, AGAIN), dict):
            raise TCError(f"{folder / name} is no JSON object; {AGAIN}")
    stated = parse_json(folder / "config.json", AGAIN)
    if not isinstance(stated.get("model_type"), str):
        raise TCError(f"{folder}/config.json states no model type (model_type); {AGAIN}")
    if problems := size_problems(stated):
        raise one_message(problems, f"{folder}/config.json makes no model:")


def pretrained_config(cfg: TeacherConfig) -> PreTrainedConfig:
    """Reads (or downloads) a teacher's configuration alone.

    Raises:
        TCError: if it cannot be had or is not one that transformers knows.
    """
    from transformers import AutoConfig

    source, options = source_of(cfg)
    with loading_errors(cfg):
        return AutoConfig.from_pretrained(source, **options)


def load_pretrained(
    cfg: TeacherConfig, config: PreTrainedConfig, empty: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the weights and the tokenizer whose configuration has been read and approved.

    Args:
        cfg: which teacher.
        config: of `pretrained_config`.
        empty: build it on the meta device, and read no weights.

    Returns:
        The model in `cfg.dtype`, and the tokenizer.

    Raises:
        TCError: if files are missing, truncated, or not of this model.
    """
    import torch
    from transformers import AutoTokenizer

    source, options = source_of(cfg)
    if "revision" in options:
        # The commit that the branch meant a moment ago: config and weights must not differ.
        options["revision"] = config._commit_hash or options["revision"]
    else:
        check_weights(Path(source))
    with loading_errors(cfg):
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    if empty:
        dtype = getattr(torch, cfg.dtype.value)
        return empty_model(config, dtype=dtype, attn_implementation="sdpa"), tokenizer
    return load_weights(cfg, source, options), tokenizer


def pretrained_identity(cfg: TeacherConfig, config: PreTrainedConfig) -> dict[str, str]:
    """What the weights are: hub id and commit, or the hash of a folder (which reads it whole)."""
    source, options = source_of(cfg)
    if "revision" in options:
        return {"hub": source, "commit": config._commit_hash or options["revision"]}
    return {"folder_sha256": folder_hash(Path(source))}


def load_weights(cfg: TeacherConfig, source: str, options: dict[str, Any]) -> PreTrainedModel:
    """Loads a causal model from safetensors; nothing may be missing or left over.

    Raises:
        TCError: naming missing and unexpected tensors. Transformers only warns of them, and draws
            what is missing at random.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with loading_errors(cfg):
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, cfg.dtype.value),
            attn_implementation="sdpa",
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    check_loaded(source, report)
    return model


def check_loaded(source: str, report: dict[str, Any]) -> None:
    """Checks what transformers says of the weights that it has loaded.

    Raises:
        TCError: naming missing, unexpected and wrongly shaped tensors.
    """
    problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    # Rotary frequencies were saved by old versions; they follow from the configuration.
    extra = sorted(name for name in report["unexpected_keys"] if "rotary_emb" not in name)
    problems += [f"{name} is not part of the model" for name in extra]
    problems += [
        f"{name} is {tuple(there)}, the model has {tuple(wanted)}"
        for name, there, wanted in sorted(report["mismatched_keys"])
    ]
    if problems:
        raise one_message(problems[:20], f"the weights at {source} do not fit their config.json:")


def check_weights(folder: Path) -> None:
    """Checks that the safetensors of a folder are all there and complete, reading headers only.

    Raises:
        TCError: naming each file that is missing or truncated.
    """
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        # Transformers takes one file for all before it looks for an index.
        names = sorted({*_indexed(folder / INDEX), *(n for n in names if n == SINGLE)})
    if not names:
        held = sorted(p.name for p in folder.iterdir() if p.is_file())[:10]
        raise TCError(
            f"{folder} has no *.safetensors weights (it has {', '.join(held)}). Pickled weights "
            "(.bin, .pt) are not read; load and save_pretrained them once, or download the weights."
        )
    problems = [problem for name in names if (problem := _weights_problem(folder / name))]
    if not any((folder / name).is_file() for name in TOKENIZERS):
        problems.append(f"there is no tokenizer (one of {', '.join(TOKENIZERS)})")
    if problems:
        raise one_message(problems, f"{folder} is not a whole model; make or download it again:")


def _indexed(index: Path) -> list[str]:
    """The files that an index names, all of them in its own folder.

    Raises:
        TCError: if it is no index, or names a place elsewhere, which must not be read.
    """
    found = parse_json(index, AGAIN)
    table = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(table, dict) or not table:
        raise TCError(f"{index} has no weight_map of tensors and files; {AGAIN}")
    names = {*map(str, table.values())}
    if bad := sorted(name for name in names if Path(name).name != name):
        raise TCError(f"{index} names files that are not beside it ({', '.join(bad[:5])}); {AGAIN}")
    return sorted(names)


def _weights_problem(path: Path) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    try:
        with safe_open(path, framework="pt") as file:
            types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        other = [f"{name} is {kind}" for name, kind in types.items() if kind not in FLOATS]
        if other:
            return (
                f"{path.name} has weights that are quantized or no weights ({other[0]}); allowed "
                f"are {', '.join(FLOATS)}"
            )
        return None
    except (SafetensorError, OSError) as error:
        return f"{path.name} ({path.stat().st_size} bytes) is truncated or damaged ({error})"


def folder_hash(folder: Path) -> str:
    """A hash of a folder's configuration, weights and tokenizer, names included."""
    patterns = ("config.json", "*.safetensors", INDEX, "tokenizer*", "vocab.json", "merges.txt")
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return hash_of({path.name: hash_file(path) for path in paths})


@contextmanager
def loading_errors(cfg: TeacherConfig) -> Iterator[None]:
    """Turns the errors of transformers and the hub into one message that says what to do."""
    try:
        with nullcontext() if is_local(str(cfg.path)) else offline_if_unreachable():
            yield
    # Nothing but other packages' readers runs in here, on files of other people: whatever they
    # raise (tokenizers raises bare Exception) means that the files are not what they should be.
    except Exception as error:
        path = str(cfg.path)
        reason = None if is_local(path) else _hub_reason(cfg, error)
        raise TCError(reason or unreadable(f"teacher.path={path}", error)) from error


def unreadable(what: str, error: Exception) -> str:
    """What to say of a model in Hugging Face's form that could not be loaded."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    first = " ".join(lines[:3])[:1000]
    return (
        f"{what} cannot be loaded: {first}. It must be a causal language model in Hugging Face's "
        "form (config.json, *.safetensors, tokenizer)."
    )


def _hub_reason(cfg: TeacherConfig, error: BaseException) -> str | None:
    """What a hub error means, or None if it is none."""
    kinds = _kinds(error)
    local = "or copy the model here and give its folder (teacher.path=/...)"
    if "GatedRepoError" in kinds:
        return (
            f"{cfg.path} is gated: accept its licence on https://huggingface.co/{cfg.path}, run "
            f"`hf auth login` (or set HF_TOKEN), {local}."
        )
    if "RevisionNotFoundError" in kinds:
        return f"{cfg.path} has no revision {cfg.revision!r}; give one with teacher.revision=main."
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return (
            f"there is no model {cfg.path!r} on the hub that you may see. Check the spelling "
            f"(owner/name; a folder must exist or begin with ./ or /), `hf auth login` if "
            f"it is private, {local}."
        )
    if kinds & UNREACHABLE:
        return (
            f"{cfg.path} is not in the local cache and the hub cannot be reached (HF_HUB_OFFLINE "
            "is set, or there is no network). Unset HF_HUB_OFFLINE, go online and download it once "
            f"(`hf download {cfg.path}`), {local}. "
            "teacher=smollm2_135m needs no network."
        )
    if "HfHubHTTPError" in kinds:
        first = str(error).strip().splitlines()[0]
        return f"the hub did not give {cfg.path}: {first} Try again later, {local}."
    return None


def _kinds(error: BaseException | None) -> set[str]:
    """Class names of an error, its bases and its causes."""
    kinds: set[str] = set()
    while error is not None:
        kinds |= {kind.__name__ for kind in type(error).__mro__}
        error = error.__cause__ or error.__context__
    return kinds
