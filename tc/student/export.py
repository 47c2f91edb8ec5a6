"""`python -m tc.student.export STUDENT OUTPUT --format remote|fla`: a folder that needs no `tc`.

- `remote`: the student as it is, with one modelling file beside it that `transformers` runs with
  `trust_remote_code=True`. It is bundled from this package's own modules.
- `fla`: flash-linear-attention's own hybrid model, where its classes can say what the student is.

Both get a model card. Weights are copied or renamed file by file: the largest file must fit in
memory, the model need not.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig

from tc import __version__
from tc.artifacts import (
    MANIFEST,
    load_tensors,
    read_json,
    read_manifest,
    replacing,
    require_space,
    verify,
    write_json,
    write_text,
)
from tc.errors import TCError, one_message
from tc.student.bundle import bundle
from tc.student.card import Results, model_card, read_results
from tc.student.fla_form import fla_config, fla_name, fla_problems
from tc.student.hybrid import CLASSES, PREFIX
from tc.teacher.pretrained import INDEX, check_weights

MODELLING = "modeling_gdn_hybrid"
"""The modelling file of a `remote` folder, without `.py`."""

MADE_ANEW = (MANIFEST, "config.json", "README.md", f"{MODELLING}.py", INDEX)
"""Files of a student that an export does not carry over."""

HEADER = '''\
"""A hybrid Gated DeltaNet student of {teacher}: all the code that it needs, in one file.

Bundled by taylor-calibrate {version} from its own modules; Apache-2.0. The classes at the end are
the teacher's, with a `GatedDeltaNet` for the attention of the layers in `config.gdn["layers"]`.

Shape letters: B batch, T tokens, H heads, K key dim, V value dim (= K), D model dim; in the chunked
rule (arXiv 2412.06464, section 3.3) C tokens of a chunk, R = B H rows of a batch, M = R times the
chunks at hand.
"""

'''

CLASSES_AT_THE_END = '''

class {config}({teacher_config}):
    """The teacher's configuration, with `gdn`: which layers are converted, and in which form."""

    model_type = "{model_type}"


class {model}(HybridMixin, {teacher}):
    """The teacher's model, some of its attention replaced by Gated DeltaNet."""

    config_class = {config}
'''


@dataclass
class Student:
    """A saved student.

    Attributes:
        folder: where it is.
        config: its `config.json` as it stands.
        weights: its safetensors files.
        others: what else is carried over: tokenizer, generation config, chat template.
    """

    folder: Path
    config: dict[str, Any]
    weights: list[Path]
    others: list[Path]

    @property
    def num_bytes(self) -> int:
        """Bytes of what is carried over."""
        return sum(path.stat().st_size for path in (*self.weights, *self.others))

    def typed_config(self) -> PreTrainedConfig:
        """The configuration with every default filled in."""
        return AutoConfig.from_pretrained(self.folder, trust_remote_code=False)


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; one message where it cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m tc.student.export", description=__doc__)
    parser.add_argument("student", type=Path, help="the student's folder: RUN/student")
    parser.add_argument("output", type=Path, help="the folder to make")
    parser.add_argument("--format", choices=sorted(WRITERS), required=True, dest="form")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="RUN",
        help="the run folder whose results the card shows; by default the one the student lies in",
    )
    parser.add_argument("--dry-run", action="store_true", help="check and say, but write nothing")
    given = parser.parse_args(arguments)
    try:
        print(export(given.student, given.output, given.form, given.results, given.dry_run))
    except TCError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def export(
    folder: Path, output: Path, form: str, run: Path | None = None, dry_run: bool = False
) -> str:
    """Makes a folder that loads without this package.

    Args:
        folder: a saved student.
        output: a folder that does not exist yet.
        form: `remote` or `fla`.
        run: the run folder whose results the card shows, or None for the one the student lies in.
        dry_run: whether to stop before anything is written.

    Returns:
        What was made, or would be, in one line.

    Raises:
        TCError: if the folder holds no whole student, cannot be said in this form, or there is
            something at `output`, or no room.
    """
    student = read_student(folder)
    if output.exists():
        raise TCError(f"{output} exists; give a folder that does not.")
    above = next(path for path in output.resolve().parents if path.exists())
    if not above.is_dir():
        raise TCError(f"{output} cannot be made: {above} is a file; give another folder.")
    if folder.resolve() in output.resolve().parents:
        raise TCError(f"{output} lies in the student's own folder; give one outside of it.")
    if form == "fla":
        _require_fla_form(student)
    if run is None and (folder.resolve().parent / "metrics.json").is_file():
        run = folder.resolve().parent
    results = read_results(run, student.config["gdn"]["provenance"]) if run else None
    size = f"{student.num_bytes / 1e6:,.1f} MB"
    if dry_run:
        return f"would write {output}: {form}, {size}; nothing was written"
    require_space(output, student.num_bytes, "the export", "Free some space or choose another one.")
    with replacing(output) as fresh:
        fresh.mkdir()
        _write(student, fresh, form, results)
    return f"{form}: {output} ({size})"


def read_student(folder: Path) -> Student:
    """Looks at a student's folder.

    Raises:
        TCError: if it is none, or not a whole one.
    """
    path = folder / "config.json"
    if not path.is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise TCError(f"{folder} {what}; give the folder of a saved student, such as RUN/student.")
    config = read_json(path)
    kind = str(config.get("model_type")) if isinstance(config, dict) else "not given"
    if kind.removeprefix(PREFIX) not in CLASSES or not kind.startswith(PREFIX):
        allowed = ", ".join(PREFIX + name for name in CLASSES)
        raise TCError(
            f"{folder} is no student: its model_type is {kind}. Allowed: {allowed}; a run makes "
            "one in RUN/student."
        )
    gdn = config.get("gdn")
    if not isinstance(gdn, dict) or not {"layers", "form", "provenance"} <= gdn.keys():
        raise TCError(
            f"{path} is damaged: its gdn must have layers, form and provenance. Save the student "
            "again: run.py stages=[student], in its run's folder."
        )
    manifest = read_manifest(folder)
    if manifest is not None:
        verify(folder, manifest)
    check_weights(folder)
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name not in MADE_ANEW)
    weights = [p for p in files if p.suffix == ".safetensors"]
    return Student(folder, config, weights, [p for p in files if p not in weights])


def _require_fla_form(student: Student) -> None:
    problems = fla_problems(student.typed_config())
    if problems:
        raise one_message(
            problems,
            f"{student.folder} cannot be said by flash-linear-attention's classes; take "
            "--format remote, or mend:",
        )


def _write(student: Student, fresh: Path, form: str, results: Results | None) -> None:
    for path in student.others:
        shutil.copy2(path, fresh / path.name)
    WRITERS[form](student, fresh)
    write_text(fresh / "README.md", model_card(student.config, form, __version__, results))


def _write_remote(student: Student, fresh: Path) -> None:
    for path in student.weights:
        shutil.copy2(path, fresh / path.name)
    if (student.folder / INDEX).is_file():
        shutil.copy2(student.folder / INDEX, fresh / INDEX)
    write_text(fresh / f"{MODELLING}.py", modelling_source(student.config))
    config, model = CLASSES[student.config["model_type"].removeprefix(PREFIX)]
    auto_map = {
        "AutoConfig": f"{MODELLING}.{config.__name__}",
        "AutoModelForCausalLM": f"{MODELLING}.{model.__name__}",
    }
    gdn = student.config["gdn"]
    # A back end that was forced here need not be there.
    gdn = {**gdn, "form": {**gdn["form"], "backend": "auto"}}
    write_json(fresh / "config.json", {**student.config, "auto_map": auto_map, "gdn": gdn})


def modelling_source(config: dict[str, Any]) -> str:
    """The modelling file of a student.

    Args:
        config: its `config.json`.
    """
    kind = config["model_type"].removeprefix(PREFIX)
    config_class, model_class = CLASSES[kind]
    teacher_config, teacher = config_class.__base__, model_class.__mro__[2]
    end = CLASSES_AT_THE_END.format(
        config=config_class.__name__,
        model=model_class.__name__,
        teacher_config=teacher_config.__name__,
        teacher=teacher.__name__,
        model_type=config["model_type"],
    )
    name = config["gdn"]["provenance"].get("teacher_name", kind)
    header = HEADER.format(teacher=name, version=__version__)
    imports = [f"from transformers import {c.__name__}" for c in (teacher_config, teacher)]
    return header + bundle([("tc.student.hybrid", "HybridMixin")], imports) + end


def _write_fla(student: Student, fresh: Path) -> None:
    for path in student.weights:
        tensors = {fla_name(name): value for name, value in load_tensors(path).items()}
        save_file(tensors, fresh / path.name, metadata={"format": "pt"})
    if (student.folder / INDEX).is_file():
        index = read_json(student.folder / INDEX)
        names = {fla_name(name): file for name, file in index["weight_map"].items()}
        write_json(fresh / INDEX, {**index, "weight_map": names})
    write_json(fresh / "config.json", fla_config(student.typed_config()))
    # `generate` of transformers 5.24 hands on `cache`, which FLA 0.6.0 reads as nothing: with a
    # cache every token but the first would be made from the last one alone.
    path = fresh / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    write_json(path, {**generation, "use_cache": False})


WRITERS: dict[str, Callable[[Student, Path], None]] = {"fla": _write_fla, "remote": _write_remote}
"""What writes code, weights and configuration of each form."""


if __name__ == "__main__":
    sys.exit(main())
