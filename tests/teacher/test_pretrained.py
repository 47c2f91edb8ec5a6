"""Local folders and hub ids: whole ones load, for the others the message says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from teacher_helpers import logits, random_cfg
from transformers import AutoConfig, AutoModelForCausalLM

from tc.config import GeometryConfig, TeacherConfig, TeacherSource
from tc.errors import TCError
from tc.teacher import Teacher, load_teacher, pretrained, read_geometry


def hf(path: Path | str | None, **fields) -> TeacherConfig:
    path = None if path is None else str(path)
    return TeacherConfig(name="mine", source=TeacherSource.hf, path=path, **fields)


@pytest.fixture
def saved(tmp_path) -> tuple[Path, Teacher]:
    teacher = load_teacher(random_cfg("qwen3", head_dim=24, tie_word_embeddings=False), tmp_path)
    teacher.model.save_pretrained(tmp_path / "mine")
    teacher.tokenizer.save_pretrained(tmp_path / "mine")
    return tmp_path / "mine", teacher


def test_local_folder(saved, tmp_path) -> None:
    folder, teacher = saved
    loaded = load_teacher(hf(folder), tmp_path)
    assert torch.equal(logits(loaded.model), logits(teacher.model))
    assert loaded.geometry == teacher.geometry == read_geometry(hf(folder))
    assert loaded.tokenizer("a b\n").input_ids == [97, 32, 98, 10]
    assert loaded.model.config._attn_implementation == "sdpa"
    assert not loaded.model.training


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_local_folder_of_each_architecture(architecture: str, tied: bool, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    fields = {"tie_word_embeddings": tied} | (experts if architecture == "qwen3_moe" else {})
    teacher = load_teacher(random_cfg(architecture, **fields), tmp_path)
    teacher.model.save_pretrained(tmp_path / "mine")
    teacher.tokenizer.save_pretrained(tmp_path / "mine")
    loaded = load_teacher(hf(tmp_path / "mine", revision="main"), tmp_path)
    assert torch.equal(logits(loaded.model), logits(teacher.model))
    assert loaded.geometry == teacher.geometry == read_geometry(hf(tmp_path / "mine"))
    head, embeddings = loaded.model.lm_head.weight, loaded.model.model.embed_tokens.weight
    assert (head is embeddings) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "mine" / "model.safetensors")) != tied
    assert "q_proj.bias" in str(list(loaded.model.state_dict())) or architecture != "qwen2"


def test_shards(saved, tmp_path) -> None:
    folder, teacher = saved
    (folder / "model.safetensors").unlink()
    teacher.model.save_pretrained(folder, max_shard_size="50KB")
    assert torch.equal(logits(load_teacher(hf(folder), tmp_path).model), logits(teacher.model))
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-5])
    with pytest.raises(TCError) as error:
        load_teacher(hf(folder), tmp_path)
    assert f"{shards[0].name} is missing" in str(error.value)
    assert f"{shards[1].name} (" in str(error.value)


def test_identity_follows_the_weights(saved, tmp_path) -> None:
    folder, _ = saved
    before = load_teacher(hf(folder), tmp_path).identity
    assert before == load_teacher(hf(f"{folder}/"), tmp_path).identity
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_teacher(hf(folder), tmp_path).identity != before


def unlink(name: str):
    return lambda folder: (folder / name).unlink()


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def reweigh(change):
    def run(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return run


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def write_config(text: str):
    return lambda folder: (folder / "config.json").write_text(text)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (unlink("config.json"), "has no config.json; teacher.path must be a folder"),
        (unlink("model.safetensors"), r"has no \*.safetensors weights"),
        (pickled, r"it has .*pytorch_model.bin.*Pickled weights .* are not read"),
        (cut, r"model.safetensors \(\d+ bytes\) is truncated or damaged"),
        (unlink("tokenizer.json"), "there is no tokenizer"),
        (write_config("{"), "config.json is not valid JSON"),
        (write_config('{"model_type": "unheard_of"}'), "cannot be loaded.*unheard_of"),
        (write_config("{}"), "states no model type"),
        (write_config('{"model_type": "gpt2"}'), "fused c_attn"),
        (
            reweigh(lambda t: t.pop("model.layers.1.self_attn.k_norm.weight")),
            r"model.layers.1.self_attn.k_norm.weight is missing",
        ),
        (
            reweigh(lambda t: t.update({"model.layers.0.self_attn.sinks": torch.ones(2)})),
            r"self_attn.sinks is not part of the model",
        ),
        (
            reweigh(lambda t: t.update({"model.norm.weight": torch.ones(3)})),
            r"model.norm.weight is \(3,\), the model has \(64,\)",
        ),
        (
            reweigh(lambda t: t.update({"model.norm.weight": torch.ones(64).half()})),
            None,
        ),
    ],
)
def test_spoilt_folder(spoil, says, saved, tmp_path) -> None:
    folder, _ = saved
    spoil(folder)
    if says is None:
        assert load_teacher(hf(folder), tmp_path).model.dtype == torch.float32
        return
    with pytest.raises(TCError, match=f"(?s){says}"):
        load_teacher(hf(folder), tmp_path)


def test_old_rotary_buffers_are_harmless(saved, tmp_path) -> None:
    folder, teacher = saved
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)}
    reweigh(lambda tensors: tensors.update(extra))(folder)
    assert torch.equal(logits(load_teacher(hf(folder), tmp_path).model), logits(teacher.model))


def test_refused_before_weights_are_read(saved, tmp_path, monkeypatch) -> None:
    folder, _ = saved
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("read")
    )
    with pytest.raises(TCError, match="head_dim is 1, but the teacher has 24"):
        load_teacher(hf(folder, geometry=GeometryConfig(2, 64, 4, 2, 1, 256, 9)), tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"model_type": "mistral", "sliding_window": 16}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(TCError, match="sliding window of 16"):
        load_teacher(hf(folder), tmp_path)
    with pytest.raises(TCError, match="sliding window of 16"):
        read_geometry(hf(folder))


def test_foreign_tokenizer(saved, tmp_path) -> None:
    folder, teacher = saved
    teacher.tokenizer.add_tokens([f"<{n}>" for n in range(100)])
    teacher.tokenizer.save_pretrained(folder)
    with pytest.raises(TCError, match="ids up to 356, but the model has 261 embeddings"):
        load_teacher(hf(folder), tmp_path)


@pytest.mark.parametrize("path", ["/no/such", "./no/such", "../no", "~/no/such/folder"])
def test_what_looks_like_a_path_is_never_sent_out(path, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *a, **k: pytest.fail("sent"))
    with pytest.raises(TCError, match=r"does not exist; teacher.path must be a folder"):
        load_teacher(hf(path), tmp_path)


def test_existing_relative_folder_is_local(saved, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "folder_sha256" in load_teacher(hf("mine"), tmp_path).identity


def test_a_file_is_no_folder(saved, tmp_path) -> None:
    with pytest.raises(TCError, match=r"is a file; give its folder, or teacher.source=gguf"):
        load_teacher(hf(saved[0] / "config.json"), tmp_path)
    with pytest.raises(TCError, match=r"has no path; .*teacher.path=Qwen"):
        load_teacher(hf(None), tmp_path)


def http(kind: type[Exception], status: int = 403) -> Exception:
    request = httpx.Request("GET", "https://huggingface.co")
    try:
        return kind("no", response=httpx.Response(status, request=request))
    except TypeError:
        return kind("no")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (errors.GatedRepoError, "is gated: accept its licence on .*hf auth login"),
        (errors.RepositoryNotFoundError, "no model 'some/model' on the hub.*hf auth login"),
        (errors.RevisionNotFoundError, "has no revision 'v9'"),
        (errors.LocalEntryNotFoundError, "HF_HUB_OFFLINE.*teacher.path=.*smollm2_135m"),
        (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE"),
        (errors.HFValidationError, "no model 'some/model' on the hub"),
    ],
)
def test_hub_errors(kind, says, tmp_path, monkeypatch) -> None:
    def fail(*_, **__):
        raise OSError("wrapped") from http(kind)

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(TCError, match=f"(?s){says}"):
        load_teacher(hf("some/model", revision="v9"), tmp_path)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (http(errors.GatedRepoError, 401), "is gated: accept its licence on .*hf auth login"),
        (http(errors.GatedRepoError, 403), "is gated: accept its licence on .*hf auth login"),
        (http(errors.RepositoryNotFoundError, 401), "no model 'some/model' on the hub"),
        (http(errors.RepositoryNotFoundError, 404), "no model 'some/model' on the hub"),
        (http(errors.RevisionNotFoundError, 404), "has no revision 'v9'; give one with"),
        (errors.LocalEntryNotFoundError("no"), "hub cannot be reached.*hf download some/model"),
        (httpx.ConnectError("no"), "hub cannot be reached.*smollm2_135m needs no network"),
        (httpx.ReadTimeout("no"), "hub cannot be reached.*smollm2_135m needs no network"),
        (http(errors.HfHubHTTPError, 503), "the hub did not give some/model: .*Try again later"),
    ],
)
def test_hub_errors_as_transformers_hands_them_on(error, says, tmp_path, monkeypatch) -> None:
    """Raised where files are fetched, so that what is seen is what transformers makes of them."""

    def fetch(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", fetch)
    with pytest.raises(TCError, match=f"(?s){says}"):
        load_teacher(hf("some/model", revision="v9"), tmp_path)


def test_offline_for_real(tmp_path, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TCError, match=r"is not in the local cache .*hf download no/such-model"):
        load_teacher(hf("no/such-model"), tmp_path)


def test_hub_commit_is_pinned(saved, tmp_path, monkeypatch) -> None:
    """Config, tokenizer and weights come from the commit that the branch meant at first."""
    folder, _ = saved
    asked = []

    def redirect(real):
        def run(source, *args, revision=None, **kwargs):
            if source != "some/model":
                return real(source, *args, **kwargs)
            asked.append((source, revision))
            loaded = real(folder, *args, **kwargs)
            if hasattr(loaded, "model_type"):
                loaded._commit_hash = "c0ffee"
            return loaded

        return run

    from transformers import AutoTokenizer

    for kind in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        monkeypatch.setattr(kind, "from_pretrained", redirect(kind.from_pretrained))
    teacher = load_teacher(hf("some/model"), tmp_path)
    assert asked == [("some/model", "main"), *[("some/model", "c0ffee")] * 2]
    assert teacher.identity == {"hub": "some/model", "commit": "c0ffee", "dtype": "float32"}
    assert pretrained.is_local(str(folder))
