"""The model card of an exported student: provenance, results, how to load it, what serves it."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tc.artifacts import differences, read_json
from tc.errors import TCError, one_message

LICENCES = {
    "smollm2_135m": "apache-2.0",
    "tiny_llama": "apache-2.0",
    "tiny_qwen2": "apache-2.0",
    "tiny_qwen3": "apache-2.0",
    "HuggingFaceTB/SmolLM2-135M": "apache-2.0",
    "HuggingFaceTB/SmolLM2-360M": "apache-2.0",
    "HuggingFaceTB/SmolLM2-1.7B": "apache-2.0",
    "meta-llama/Llama-3.2-3B": "llama3.2",
    "Qwen/Qwen2.5-1.5B": "apache-2.0",
    "Qwen/Qwen2.5-3B": "qwen-research",
    "Qwen/Qwen3-0.6B": "apache-2.0",
    "Qwen/Qwen3-4B": "apache-2.0",
    "Qwen/Qwen3-8B": "apache-2.0",
    "Qwen/Qwen3-30B-A3B": "apache-2.0",
}
"""Licences of shipped teachers, by hub id, or by name where the teacher is not from the hub."""

ON_THE_HUB = ("apache-2.0", "llama3.2")
"""Of these, the ones that the hub has a short name for."""

LOAD = {
    "remote": """\
Besides torch and transformers 5.24 or later, the modelling file here is all the code that it needs:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

student = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("PATH", trust_remote_code=True)
ids = tokenizer("My fellow Americans,", return_tensors="pt").input_ids
print(tokenizer.decode(student.generate(ids, max_new_tokens=40)[0]))
```

On a GPU, `pip install flash-linear-attention` for its kernels; without it the recurrence runs in
plain PyTorch, and says so.""",
    "fla": """\
It is a `GatedDeltaNetForCausalLM` of flash-linear-attention 0.6, with no code of its own. That
needs a GPU and, for the layers that keep attention, flash-attn:

```python
import fla  # registers the class
from transformers import AutoModelForCausalLM, AutoTokenizer

student = AutoModelForCausalLM.from_pretrained("PATH").cuda()
tokenizer = AutoTokenizer.from_pretrained("PATH")
ids = tokenizer("My fellow Americans,", return_tensors="pt").input_ids.cuda()
print(tokenizer.decode(student.generate(ids, max_new_tokens=40)[0]))
```

`generation_config.json` turns the cache off, so every new token costs a whole forward pass: with
transformers 5.24 `generate()` of FLA 0.6.0 loses its cache without a word, and its text with it.
Step by step, `student(ids, past_key_values=...)`, the cache works.

FLA's class loads `A_log` and `dt_bias` in the model's dtype; in bfloat16 it rounds them, and with
them the longest half-lives. flash-attn takes bfloat16 and float16 only: for full digits load with
`dtype="float32"` and run under `torch.autocast("cuda", torch.bfloat16)`.""",
}

SERVING = """\
As of 2026-11-30, by their source (vLLM 0.33.0, SGLang 0.5.23); neither was run on this model.

- **transformers**: yes, as above, with `generate()` and padding on either side.
- **vLLM**: no. It has Gated DeltaNet kernels, and serves with them what has its own class there
  (Qwen3-Next, Qwen3.5, OLMo Hybrid); this has none. {vllm}
- **SGLang**: no, for the same reason (it has classes for Qwen3-Next and Qwen3.5). {sglang}"""

FALLBACKS = {
    "remote": {
        "vllm": "Its transformers backend would run a recurrent layer without its state; it looks "
        "for an `AutoModel` class, and there is none here on purpose.",
        "sglang": "Its transformers backend refuses a class that does not declare "
        "`_supports_attention_backend`, as this one does not on purpose.",
    },
    "fla": {
        "vllm": "Its transformers backend knows classes of transformers itself and of an "
        "`auto_map`; FLA's is neither.",
        "sglang": "The same holds of its transformers backend.",
    },
}
"""What their general way of serving any model of transformers makes of a student."""


@dataclass
class Results:
    """What a run folder says of its student.

    Attributes:
        science: the flat configuration that results follow from.
        metrics: the flat metrics.
        rows: the long table of results, a dictionary a row; empty where there is none.
        commit: of the code, where it is known.
    """

    science: dict[str, Any]
    metrics: dict[str, Any]
    rows: list[dict[str, str]]
    commit: str | None


def read_results(run: Path, provenance: dict[str, Any]) -> Results:
    """Reads a run folder.

    Raises:
        TCError: if it is none, has no metrics yet, or made another student.
    """
    needed = ("science.json", "metrics.json")
    missing = [name for name in needed if not (run / name).is_file()]
    if missing:
        raise TCError(
            f"{run} has no {' and no '.join(missing)}; --results wants the folder of a finished "
            "run (out/...), the one that made this student."
        )
    science = read_json(run / "science.json")
    there = {key: science.get(f"{key}.name") for key in ("policy", "init")}
    there |= {"teacher_name": science.get("teacher.name"), "seed": science.get("seed")}
    known = {key: provenance[key] for key in there if key in provenance}
    changed = differences({key: there[key] for key in known}, known)
    if changed:
        raise one_message(
            changed, f"{run} is not the run that made this student (run -> student); give another:"
        )
    table, record = run / "results.csv", run / "environment.json"
    rows = []
    if table.is_file():
        with open(table, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    commit = read_json(record).get("git_commit") if record.is_file() else None
    return Results(science, read_json(run / "metrics.json"), rows, commit)


def model_card(config: dict[str, Any], form: str, version: str, results: Results | None) -> str:
    """The text of a `README.md`.

    Args:
        config: the student's own `config.json`.
        form: `remote` or `fla`.
        version: of this package.
        results: of the run that made it, or None.
    """
    provenance = config["gdn"]["provenance"]
    science = results.science if results else {}
    title = f"# A hybrid Gated DeltaNet student of {_teacher(provenance, science)}"
    total, converted = config["num_hidden_layers"], config["gdn"]["layers"]
    parts = [
        _front_matter(provenance, science),
        title,
        f"{_layers(total, len(converted))} Made by Taylor-Calibrate (arXiv 2606.16429).",
        "## Loading",
        LOAD[form],
        "## Provenance",
        _table(["", ""], _provenance_rows(config, version, results)),
        *_result_parts(results),
        "## Serving",
        SERVING.format(**FALLBACKS[form]),
        "## Citation",
        "The method: *Taylor-Calibrate*, arXiv 2606.16429. Gated DeltaNet: arXiv 2412.06464. "
        "Kernels and parameter names: flash-linear-attention. Please cite the teacher as well.",
        "## Licence",
        _licence_note(provenance, science),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _layers(total: int, converted: int) -> str:
    """How many layers of which kind a student has, as a sentence."""
    kept = total - converted
    mixer = "Gated DeltaNet mixers, each with a state of constant size"
    if kept == 0:
        return f"All {total} layers are {mixer}."
    if converted == 0:
        return f"All {total} layers keep the teacher's softmax attention."
    keep = "1 keeps" if kept == 1 else f"{kept} keep"
    if converted == 1:
        mixers = "the other one is a Gated DeltaNet mixer with a state of constant size"
    else:
        mixers = f"the other {converted} are {mixer}"
    return f"Of {total} layers {keep} the teacher's softmax attention; {mixers}."


def _teacher(provenance: dict[str, Any], science: dict[str, Any]) -> str:
    """The teacher's hub id, or its name where it is not from the hub."""
    name = provenance.get("teacher_name") or science.get("teacher.name")
    return provenance.get("teacher", {}).get("hub") or name or "a teacher"


def _front_matter(provenance: dict[str, Any], science: dict[str, Any]) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    hub = provenance.get("teacher", {}).get("hub")
    licence = LICENCES.get(_teacher(provenance, science))
    if hub:
        lines.append(f"base_model: {hub}")
    if licence in ON_THE_HUB:
        lines.append(f"license: {licence}")
    elif licence:
        lines += ["license: other", f"license_name: {licence}"]
    lines += ["tags:", "- gated-deltanet", "- linear-attention", "- taylor-calibrate"]
    return "\n".join(["---", *lines, "---"])


def _licence_note(provenance: dict[str, Any], science: dict[str, Any]) -> str:
    name = _teacher(provenance, science)
    licence = LICENCES.get(name)
    if licence is None:
        return (
            f"The weights come from {name} and follow its licence, which Taylor-Calibrate does not "
            "know: look it up and state it here before you publish them. The code is Apache-2.0."
        )
    return (
        f"The weights come from {name} and follow its licence, {licence} (as listed by "
        "Taylor-Calibrate; the teacher's own page decides). The code is Apache-2.0."
    )


def _provenance_rows(
    config: dict[str, Any], version: str, results: Results | None
) -> list[list[str]]:
    gdn = config["gdn"]
    provenance, science = gdn["provenance"], results.science if results else {}
    converted = set(gdn["layers"])
    kept = [i for i in range(config["num_hidden_layers"]) if i not in converted]
    identity = provenance.get("teacher", {})
    rows: list[tuple[str, Any]] = [
        ("teacher", _teacher(provenance, science)),
        ("revision", identity.get("commit") or science.get("teacher.revision")),
        ("teacher's weights", _plain({k: v for k, v in identity.items() if k != "dtype"})),
        ("dtype", config.get("dtype")),
        ("init", provenance.get("init")),
        ("policy", provenance.get("policy") or science.get("policy.name")),
        ("layers that keep attention", ", ".join(map(str, kept)) or "none"),
        ("form of the mixers", _plain(gdn["form"])),
        ("text", science.get("data.name")),
        ("calibration tokens", science.get("data.calibration_tokens")),
        ("recovery tokens, stage 1", science.get("recovery.stage1.tokens")),
        ("recovery tokens, stage 2", science.get("recovery.stage2.tokens")),
        ("seed", provenance.get("seed")),
        ("made by", f"taylor-calibrate {provenance.get('version', 'unknown')}"),
        ("commit", results.commit if results else None),
        ("exported by", f"taylor-calibrate {version}"),
    ]
    return [[name, _number(value)] for name, value in rows if value not in (None, "")]


def _result_parts(results: Results | None) -> list[str]:
    if results is None:
        return ["## Results", "None were given to the export (`--results RUN`)."]
    parts = ["## Results"]
    rows = _perplexity_rows(results.metrics)
    if rows:
        tokens = results.metrics.get("evaluation_tokens")
        parts.append(f"Perplexity on {_number(tokens)} held-out tokens of the same kind of text.")
        parts.append(_table(["model", "perplexity", "x teacher"], rows))
    if results.rows:
        columns = [c for c in results.rows[0] if any(row.get(c) for row in results.rows)]
        parts.append(
            _table(columns, [[_cell(row.get(c)) for c in columns] for row in results.rows])
        )
    if len(parts) == 1:
        parts.append("The run measured nothing yet.")
    return parts


def _perplexity_rows(metrics: dict[str, Any]) -> list[list[str]]:
    values = {
        name: metrics[f"{name}/perplexity"]
        for name in ("teacher", "copy_only", "zero_shot", "student")
        if f"{name}/perplexity" in metrics
    }
    teacher = values.get("teacher")
    return [
        [name, f"{value:,.2f}", f"{value / teacher:,.2f}" if teacher else ""]
        for name, value in values.items()
    ]


def _cell(text: str | None) -> str:
    """A cell of the long table; floats have four digits, `results.csv` has them all."""
    try:
        int(text or "")
    except ValueError:
        try:
            return f"{float(text or ''):,.4g}"
        except ValueError:
            return text or ""
    return _number(int(text or ""))


def _plain(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def _number(value: Any) -> str:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_count else str(value)


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(x).replace("|", "\\|") for x in r) + " |" for r in lines)
