"""Nothing that comes in a file is executed: no pickle, no code of a model's, no targets."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from composing import ROOT
from fault_helpers import rewrite_json, said, said_by_teacher

from tc.artifacts import Manifest, load_tensors
from tc.config import TeacherConfig, TeacherSource, read_config
from tc.errors import TCError
from tc.recovery.checkpoint import latest
from tc.student.saved import check_saved, load_saved
from tc.teacher import Teacher, load_teacher

FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load"),
    *("yaml.load", "yaml.unsafe_load", "pd.read_pickle", "hydra.utils.instantiate", "instantiate"),
    *("os.system", "apply_chat_template", "load_module", "exec_module", "pickle_load"),
}


ALLOWED = {"tc/sweep/slurm.py": {"cloudpickle", "pickle_load"}}
"""Submitit hands its jobs over as pickles, in a folder of the sweep that nothing else writes to."""


def dangers(source: str) -> Iterator[str]:
    """Imports and calls that run what they are given, and models loaded without a word on code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_IMPORTS)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in FORBIDDEN_IMPORTS:
                yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS or name.split(".")[-1] == "apply_chat_template":
                yield name
            if name.endswith((".from_pretrained", ".from_config")) and name.startswith("Auto"):
                yield from _trust(name, node)
            if any(k.arg == "shell" for k in node.keywords):
                yield f"{name}(shell=)"


def _trust(name: str, node: ast.Call) -> Iterator[str]:
    given = {k.arg: k.value for k in node.keywords}
    if name.endswith("from_config") and "trust_remote_code" not in given:
        return  # of a configuration object: there is no repository
    value = given.get("trust_remote_code")
    says_no = isinstance(value, ast.Constant) and value.value is False
    if not says_no and None not in given:  # None: `**options`, whose value is looked at below
        yield f"{name} without trust_remote_code=False"


@pytest.mark.parametrize("path", [*sorted((ROOT / "tc").rglob("*.py")), ROOT / "run.py"], ids=str)
def test_no_source_has_a_way_to_run_what_it_reads(path: Path) -> None:
    known = ALLOWED.get(str(path.relative_to(ROOT)), set())
    assert set(dangers(path.read_text())) == known


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "np.load(p, allow_pickle=True)",
        "eval(text)",
        "tokenizer.apply_chat_template(x)",
        "AutoModelForCausalLM.from_pretrained(x)",
        "AutoConfig.from_pretrained(x, trust_remote_code=True)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_the_search_finds_them(source: str) -> None:
    assert list(dangers(source))


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return _write, (str(self.marker), "executed")


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "executed"


@pytest.fixture
def evil(marker: Path) -> bytes:
    data = pickle.dumps(Evil(marker))
    pickle.loads(data)  # the control: it does write where it is loaded
    assert marker.exists()
    marker.unlink()
    return data


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Teacher, Path]:
    model = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    cfg = TeacherConfig(
        name="made", source=TeacherSource.random, architecture="llama", model=model | heads
    )
    folder = tmp_path_factory.mktemp("whole")
    teacher = load_teacher(cfg, folder)
    teacher.model.save_pretrained(folder)
    teacher.tokenizer.save_pretrained(folder)
    return teacher, folder


@pytest.fixture
def folder(made: tuple[Teacher, Path], tmp_path: Path) -> Path:
    return shutil.copytree(made[1], tmp_path / "model")


PICKLES = [
    *("pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt", "adapter_model.bin"),
    *("optimizer.pt", "random_states_0.pkl", "training_args.bin", "rng_state.pth", "x.pkl"),
    *("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "flax_model.msgpack"),
    *("special_tokens_map.json", "chat_template.jinja", "pytorch_model.bin.index.json"),
]


def loaded(folder: Path) -> object:
    cfg = TeacherConfig(name="x", source=TeacherSource.hf, path=str(folder))
    return load_teacher(cfg, folder.parent / "cache")


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_in_a_models_folder(name: str, folder: Path, evil: bytes, marker: Path) -> None:
    """Beside good weights it is not touched, or refused; in their place it is refused."""
    (folder / name).write_bytes(evil)
    try:
        loaded(folder)
    except TCError as error:
        assert str(error).strip()
    assert not marker.exists()
    (folder / "model.safetensors").unlink()
    assert str(folder) in said_by_teacher(folder.parent, path=str(folder))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pickle_under_a_good_name(name: str, folder: Path, evil: bytes, marker: Path) -> None:
    (folder / name).write_bytes(evil)
    assert str(folder) in said_by_teacher(folder.parent, path=str(folder))
    assert not marker.exists()


@pytest.mark.parametrize("suffix", [".gguf", ".bin", ".pt"])
def test_a_pickle_as_a_gguf_file(suffix: str, tmp_path: Path, evil: bytes, marker: Path) -> None:
    path = tmp_path / f"m{suffix}"
    path.write_bytes(evil)
    message = said_by_teacher(tmp_path, source=TeacherSource.gguf, path=str(path))
    assert "is not a GGUF file" in message
    assert not marker.exists()


def code(folder: Path, marker: Path) -> None:
    """Puts a module into a folder that writes a file when it is imported."""
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').write('executed')\n")
    auto = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoModel": "evil.M"}
    rewrite_json(folder / "config.json", lambda c: c.update(auto_map=auto))
    auto = {"AutoTokenizer": ["evil.T", "evil.T"]}  # type: ignore[dict-item]
    rewrite_json(folder / "tokenizer_config.json", lambda c: c.update(auto_map=auto))


def test_code_in_a_models_folder_of_a_known_type(folder: Path, marker: Path) -> None:
    code(folder, marker)
    loaded(folder)
    assert not marker.exists()


def test_code_in_a_models_folder_of_its_own_type(folder: Path, marker: Path) -> None:
    code(folder, marker)
    rewrite_json(folder / "config.json", lambda c: c.update(model_type="evil"))
    assert str(folder) in said_by_teacher(folder.parent, path=str(folder))
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["llama", "evil"])
def test_code_in_a_students_folder(
    kind: str, folder: Path, marker: Path, made: tuple[Teacher, Path]
) -> None:
    code(folder, marker)
    rewrite_json(folder / "config.json", lambda c: c.update(model_type=kind))

    def load() -> None:
        check_saved(str(folder), made[0].tokenizer)
        load_saved(str(folder), torch.float32)

    if kind == "evil":
        assert str(folder) in said(load)
    else:
        load()
    assert not marker.exists()


def test_a_chat_template_is_kept_and_not_run(folder: Path, marker: Path) -> None:
    run_it = "{{ cycler.__init__.__globals__.os.system('touch " + str(marker) + "') }}"
    rewrite_json(folder / "tokenizer_config.json", lambda c: c.update(chat_template=run_it))
    loaded(folder)
    assert not marker.exists()


def test_a_runs_configuration_is_read_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TC_SECRET", "secret")
    lines = "a: ${oc.env:TC_SECRET}\nb:\n  _target_: os.system\n  command: ls\n"
    (tmp_path / "config.yaml").write_text(lines)
    cfg = read_config(tmp_path / "config.yaml")
    assert cfg.a == "${oc.env:TC_SECRET}"
    assert cfg.b == {"_target_": "os.system", "command": "ls"}


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch executed']",
        "a: !!python/name:os.system",
        "- 1",
        "5",
        "a: [",
        "a: 1\na: 2",
        "\x00",
        "*x",
        "[" * 5000,
    ],
)
def test_a_runs_configuration_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert "config.yaml" in said(lambda: read_config(tmp_path / "config.yaml"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml"]


def test_pickles_in_the_place_of_tensors(tmp_path: Path, evil: bytes, marker: Path) -> None:
    path = tmp_path / "tokens.safetensors"
    path.write_bytes(evil)
    assert str(path) in said(lambda: load_tensors(path))
    assert not marker.exists()


def test_pickles_in_the_place_of_checkpoints(tmp_path: Path, evil: bytes, marker: Path) -> None:
    """Without a manifest, and with one that is true of them: both are passed over or refused."""
    wanted = Manifest("recover stage1", {"a": 1})
    for n, name in enumerate(("rank_000.safetensors", "state.pt", "random_state.pkl")):
        step = tmp_path / f"step_{n:09d}"
        step.mkdir()
        (step / name).write_bytes(evil)
    told: list[str] = []
    assert latest(tmp_path, wanted, told.append) is None
    assert len(told) == 3
    assert not marker.exists()


def test_a_manifest_that_names_what_is_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    step = tmp_path / "step_000000001"
    step.mkdir()
    facts = {"sha256": "0" * 64, "bytes": 1}
    manifest = {"kind": "k", "made_by": {}, "files": {"../secret": facts}}
    (step / "manifest.json").write_text(json.dumps(manifest))
    told: list[str] = []
    assert latest(tmp_path, Manifest("k", {}), told.append) is None
    assert "outside" in told[0]
