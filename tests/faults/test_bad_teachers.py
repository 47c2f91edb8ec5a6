"""Models that are not whole, not theirs, or not what they say: refused in one message each."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fault_helpers import rewrite_json, said_by_teacher, unfinished, with_header
from safetensors.torch import load_file, save_file
from teacher_helpers import gguf_header, gguf_tensors, write_gguf

from tc.config import TeacherConfig, TeacherSource
from tc.teacher import Teacher, load_teacher

MODEL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 261,
}
WEIGHTS, SHARD, INDEX, Q = (
    "model.safetensors",
    "model-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "model.layers.0.self_attn.q_proj.weight",
)

Break = Callable[[Path], Any]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    cfg = TeacherConfig(
        name="made", source=TeacherSource.random, architecture="llama", model=dict(MODEL)
    )
    return load_teacher(cfg, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def whole(made: Teacher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def whole_gguf(made: Teacher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors, header = gguf_tensors(made.model), gguf_header(made.model)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama", header, tensors)


def bytes_of(name: str, change: Callable[[bytes], bytes]) -> Break:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def written(name: str, data: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(data)


def removed(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def config(**values: Any) -> Break:
    return lambda folder: rewrite_json(folder / "config.json", lambda c: c.update(values))


def without(*keys: str) -> Break:
    def change(value: dict[str, Any]) -> None:
        for key in keys:
            del value[key]

    return lambda folder: rewrite_json(folder / "config.json", change)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    def act(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        change(held)
        save_file(held, folder / WEIGHTS, {"format": "pt"})

    return act


def index(weight_map: Any) -> Break:
    def act(folder: Path) -> None:
        names = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).rename(folder / SHARD)
        given = dict.fromkeys(names, weight_map) if isinstance(weight_map, str) else weight_map
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": given}))

    return act


def tokenizer(change: Callable[[Any], Any]) -> Break:
    return lambda folder: rewrite_json(folder / "tokenizer.json", change)


def poisoned(value: float) -> Break:
    return tensors(lambda t: t[Q].view(-1).__setitem__(7, value))


def cast(dtype: torch.dtype) -> Break:
    return tensors(lambda t: t.__setitem__(Q, t[Q].to(dtype)))


def outside(folder: Path) -> None:
    shutil.copy(folder / WEIGHTS, folder.parent / "x.safetensors")
    index("../x.safetensors")(folder)


def longer_vocabulary(value: Any) -> None:
    value["model"]["vocab"] |= {f"word{n}": 300 + n for n in range(9)}


DEEP = b"[" * 100_000
BAD_FOLDERS: dict[str, tuple[Break, str]] = {
    "no config": (removed("config.json"), "config.json"),
    "no weights": (removed(WEIGHTS), "no *.safetensors weights"),
    "no tokenizer": (removed("tokenizer.json"), "no tokenizer"),
    "config empty": (written("config.json", b""), "config.json"),
    "config cut": (bytes_of("config.json", lambda b: b[: len(b) // 2]), "config.json"),
    "config binary": (written("config.json", b"\x80\x04\xff\xfe"), "config.json"),
    "config a list": (written("config.json", b"[]"), "config.json"),
    "config null": (written("config.json", b"null"), "config.json"),
    "config a string": (written("config.json", b'"llama"'), "config.json"),
    "config deep": (written("config.json", DEEP), "config.json"),
    "config deep inside": (
        written("config.json", b'{"model_type":"llama","x":' + DEEP),
        "config.json",
    ),
    "config long number": (written("config.json", b'{"x":' + b"9" * 5000 + b"}"), "config.json"),
    "config empty object": (written("config.json", b"{}"), "model type"),
    "no model type": (without("model_type"), "model type"),
    "model type unknown": (config(model_type="nonsense"), "nonsense"),
    "model type a number": (config(model_type=5), "model"),
    "model type a list": (config(model_type=["llama"]), "model"),
    "model type gpt2": (config(model_type="gpt2"), "gpt2"),
    "layers negative": (config(num_hidden_layers=-1), "num_hidden_layers"),
    "layers zero": (config(num_hidden_layers=0), "num_hidden_layers"),
    "layers text": (config(num_hidden_layers="many"), "num_hidden_layers"),
    "layers null": (config(num_hidden_layers=None), "num_hidden_layers"),
    "layers many": (config(num_hidden_layers=2), "is missing"),
    "layers too many": (config(num_hidden_layers=10**9), "num_hidden_layers"),
    "hidden zero": (config(hidden_size=0), "hidden_size"),
    "hidden other": (config(hidden_size=64), "do not fit"),
    "hidden a float": (config(hidden_size=32.5), "hidden_size"),
    "hidden huge": (config(hidden_size=2**62), "hidden_size"),
    "heads zero": (config(num_attention_heads=0), "num_attention_heads"),
    "heads uneven": (config(num_attention_heads=3), "attention heads (3)"),
    "heads other": (config(num_attention_heads=4), "do not fit"),
    "groups zero": (config(num_key_value_heads=0), "num_key_value_heads"),
    "groups uneven": (config(num_attention_heads=4, num_key_value_heads=3), "num_key_value_heads"),
    "head size zero": (config(head_dim=0), "head_dim"),
    "head size odd": (config(head_dim=15), "head_dim"),
    "vocabulary zero": (config(vocab_size=0), "vocab_size"),
    "vocabulary small": (config(vocab_size=99), "vocab_size is 99"),
    "activation": (config(hidden_act="nonsense"), "nonsense"),
    "rotary kind": (
        config(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4}),
        "nonsense",
    ),
    "rotary base": (config(rope_parameters={"rope_type": "default", "rope_theta": 0}), "rope"),
    "rotary text": (config(rope_parameters="default"), "rope"),
    "quantized": (config(quantization_config={"quant_method": "bitsandbytes"}), "quantized"),
    "quantized text": (config(quantization_config="fp8"), "quantiz"),
    "window": (config(model_type="mistral", sliding_window=64), "window"),
    "adapter": (
        written("adapter_config.json", b'{"base_model_name_or_path":"x","peft_type":"LORA"}'),
        "adapter",
    ),
    "weights empty": (written(WEIGHTS, b""), "truncated or damaged"),
    "weights cut": (bytes_of(WEIGHTS, lambda b: b[:-100]), "truncated or damaged"),
    "weights cut in header": (bytes_of(WEIGHTS, lambda b: b[:100]), "truncated or damaged"),
    "weights cut in length": (bytes_of(WEIGHTS, lambda b: b[:5]), "truncated or damaged"),
    "weights long": (bytes_of(WEIGHTS, lambda b: b + b"more"), "truncated or damaged"),
    "weights pickled": (written(WEIGHTS, b"\x80\x04\x95.."), "truncated or damaged"),
    "weights text": (written(WEIGHTS, b"version https://git-lfs\n" * 9), "truncated or damaged"),
    "header huge": (written(WEIGHTS, with_header(b"{}", 2**62)), "truncated or damaged"),
    "header all": (written(WEIGHTS, with_header(b"{}", 2**64 - 1)), "truncated or damaged"),
    "header deep": (written(WEIGHTS, with_header(DEEP)), "truncated or damaged"),
    "header list": (written(WEIGHTS, with_header(b"[]      ")), "truncated or damaged"),
    "header twice": (
        written(
            WEIGHTS,
            with_header(
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                b'"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
                data=b"\0" * 4,
            ),
        ),
        "truncated or damaged",
    ),
    "header negative": (
        written(
            WEIGHTS,
            with_header(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', data=b"\0" * 4),
        ),
        "truncated or damaged",
    ),
    "header no tensors": (written(WEIGHTS, with_header(b"{}")), ""),
    "weights nan": (poisoned(float("nan")), "not finite"),
    "weights inf": (poisoned(float("inf")), "not finite"),
    "weights -inf": (poisoned(float("-inf")), "not finite"),
    "weights int8": (cast(torch.int8), "I8"),
    "weights int64": (cast(torch.int64), "I64"),
    "weights bool": (cast(torch.bool), "BOOL"),
    "weights fp8": (cast(torch.float8_e4m3fn), "F8"),
    "tensor missing": (tensors(lambda t: t.pop(Q)), f"{Q} is missing"),
    "tensor renamed": (tensors(lambda t: t.__setitem__("q", t.pop(Q))), "is not part of"),
    "tensor more": (tensors(lambda t: t.__setitem__("x", torch.zeros(2))), "x is not part"),
    "tensor shape": (tensors(lambda t: t.__setitem__(Q, t[Q][:5].clone())), "q_proj"),
    "tensor scalar": (tensors(lambda t: t.__setitem__(Q, torch.tensor(1.0))), "q_proj"),
    "tensor empty": (tensors(lambda t: t.__setitem__(Q, torch.zeros(0))), "q_proj"),
    "tensor flat": (tensors(lambda t: t.__setitem__(Q, t[Q].flatten())), "q_proj"),
    "index of a shard that is gone": (index("gone.safetensors"), "gone.safetensors is missing"),
    "index outside": (outside, "../x.safetensors"),
    "index absolute": (index("/etc/passwd"), "/etc/passwd"),
    "index of a folder": (index("."), "."),
    "index empty": (written(INDEX, b""), INDEX),
    "index a list": (written(INDEX, b"[]"), INDEX),
    "index without map": (written(INDEX, b"{}"), INDEX),
    "index of nothing": (index({}), INDEX),
    "index of numbers": (index({Q: 5}), "5 is missing"),
    "index map a list": (index([SHARD]), INDEX),
    "index deep": (written(INDEX, DEEP), INDEX),
    "one file beside an index": (
        lambda folder: (
            shutil.copy(folder / WEIGHTS, folder / "whole.safetensors"),
            bytes_of(WEIGHTS, lambda b: b[:-100])(folder),
            (folder / INDEX).write_text(json.dumps({"weight_map": {Q: "whole.safetensors"}})),
        ),
        "truncated or damaged",
    ),
    "tokenizer empty": (written("tokenizer.json", b""), "tokenizer"),
    "tokenizer cut": (bytes_of("tokenizer.json", lambda b: b[:500]), "tokenizer"),
    "tokenizer binary": (written("tokenizer.json", b"\x80\x04\xff"), "tokenizer"),
    "tokenizer a list": (written("tokenizer.json", b"[]"), "tokenizer"),
    "tokenizer empty object": (written("tokenizer.json", b"{}"), "tokenizer"),
    "tokenizer deep": (written("tokenizer.json", DEEP), "tokenizer"),
    "tokenizer of more words": (tokenizer(longer_vocabulary), "the tokenizer has ids"),
    "tokenizer of no words": (
        tokenizer(lambda t: (t["model"].update(vocab={}), t.update(added_tokens=[]))[2:]),
        "tokenizer",
    ),
    "tokenizer kind": (tokenizer(lambda t: t["model"].update(type="Nonsense")), "tokenizer"),
    "tokenizer merges": (tokenizer(lambda t: t["model"].update(merges=[["x9", "y9"]])), "tokeniz"),
    "tokenizer config cut": (bytes_of("tokenizer_config.json", lambda b: b[:30]), "tokenizer"),
    "tokenizer config list": (written("tokenizer_config.json", b"[]"), "tokenizer"),
    "tokenizer config deep": (written("tokenizer_config.json", DEEP), "tokenizer"),
    "generation config cut": (written("generation_config.json", b"{"), "generation_config"),
    "generation config list": (written("generation_config.json", b"[]"), "generation_config"),
    "generation config deep": (written("generation_config.json", DEEP), "generation_config"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_bad_folder(name: str, whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    change, word = BAD_FOLDERS[name]
    change(folder)
    message = said_by_teacher(tmp_path, path=str(folder))
    assert word in message
    assert str(folder) in message or "teacher" in message
    assert not (tmp_path / "cache").exists()


def test_the_whole_folder_loads(whole: Path, tmp_path: Path) -> None:
    """The control: what is refused above is refused for what was broken."""
    cfg = TeacherConfig(name="good", source=TeacherSource.hf, path=str(whole))
    assert load_teacher(cfg, tmp_path).geometry.num_hidden_layers == 1


def at(offset: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda b: b[:offset] + data + b[offset + len(data) :]


HUGE = struct.pack("<Q", 2**62)
BAD_BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda b: b"", "not a GGUF file"),
    "three bytes": (lambda b: b[:3], "not a GGUF file"),
    "magic only": (lambda b: b[:4], "truncated or damaged"),
    "pickle": (lambda b: b"\x80\x04" + b, "not a GGUF file"),
    "pointer": (lambda b: b"version https://git-lfs", "not a GGUF file"),
    "cut 12": (lambda b: b[:12], "truncated or damaged"),
    "cut 24": (lambda b: b[:24], "truncated or damaged"),
    "cut 200": (lambda b: b[:200], "truncated or damaged"),
    "cut half": (lambda b: b[: len(b) // 2], "truncated or damaged"),
    "cut end": (lambda b: b[:-1000], "truncated or damaged"),
    "version 0": (at(4, b"\0\0\0\0"), "truncated or damaged"),
    "version 99": (at(4, b"\x63\0\0\0"), "truncated or damaged"),
    "tensors huge": (at(8, HUGE), "truncated or damaged"),
    "keys huge": (at(16, HUGE), "truncated or damaged"),
    "first key huge": (at(24, HUGE), "truncated or damaged"),
    "first type": (
        lambda b: b.replace(b"general.architecture\x08", b"general.architecture\x63"),
        "",
    ),
    "no such architecture": (
        lambda b: b.replace(b"\5" + b"\0" * 7 + b"llama", b"\5" + b"\0" * 7 + b"nopes"),
        "",
    ),
    "names not UTF-8": (
        lambda b: b.replace(b"general.architecture", b"general.\xff\xferchitecture"),
        "",
    ),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_a_bad_gguf_file(name: str, whole_gguf: Path, tmp_path: Path) -> None:
    change, word = BAD_BYTES[name]
    path, before = tmp_path / "m.gguf", whole_gguf.read_bytes()
    path.write_bytes(change(before))
    if path.read_bytes() == before:
        pytest.fail("nothing was broken")
    message = said_by_teacher(tmp_path, source=TeacherSource.gguf, path=str(path))
    assert word in message
    assert str(path) in message
    assert not (tmp_path / "cache").exists() or unfinished(tmp_path) == []


BAD_HEADERS: dict[str, dict[str, Any]] = {
    "no layers": {"llama.block_count": None},
    "layers zero": {"llama.block_count": 0},
    "layers text": {"llama.block_count": "two"},
    "layers more": {"llama.block_count": 9},
    "hidden other": {"llama.embedding_length": 64},
    "heads uneven": {"llama.attention.head_count": 3},
    "groups uneven": {"llama.attention.head_count_kv": 3},
    "epsilon": {"llama.attention.layer_norm_rms_epsilon": -1.0},
    "epsilon nan": {"llama.attention.layer_norm_rms_epsilon": float("nan")},
    "epsilon inf": {"llama.attention.layer_norm_rms_epsilon": float("inf")},
    "rotary size": {"llama.rope.dimension_count": 8},
    "rotary base zero": {"llama.rope.freq_base": 0.0},
    "rotary base text": {"llama.rope.freq_base": "big"},
    "head size text": {"llama.attention.key_length": "x"},
    "head size zero": {"llama.attention.key_length": 0},
    "tokenizer kind": {"tokenizer.ggml.model": "llama"},
    "tokenizer pre": {"tokenizer.ggml.pre": "nonsense"},
    "tokens none": {"tokenizer.ggml.tokens": None},
    "tokens twice": {"tokenizer.ggml.tokens": ["a"] * 261},
    "tokens few": {"tokenizer.ggml.tokens": ["a", "b"]},
    "tokens numbers": {"tokenizer.ggml.tokens": list(range(261))},
    "tokens text": {"tokenizer.ggml.tokens": "abc"},
    "types few": {"tokenizer.ggml.token_type": [1, 2]},
    "merges none": {"tokenizer.ggml.merges": None},
    "merges one word": {"tokenizer.ggml.merges": ["he"]},
    "merges unknown": {"tokenizer.ggml.merges": ["\u4e00 \u4e01"]},
    "merges numbers": {"tokenizer.ggml.merges": [1, 2]},
    "eos beyond": {"tokenizer.ggml.eos_token_id": 9999},
    "eos text": {"tokenizer.ggml.eos_token_id": "end"},
    "part of three": {"split.count": 3},
    "experts": {"llama.expert_count": 8},
    "context text": {"llama.context_length": "long"},
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_bad_gguf_header(name: str, made: Teacher, tmp_path: Path) -> None:
    header = gguf_header(made.model) | BAD_HEADERS[name]
    path = write_gguf(tmp_path / "m.gguf", "llama", header, gguf_tensors(made.model))
    message = said_by_teacher(tmp_path, source=TeacherSource.gguf, path=str(path))
    assert str(path) in message or "This teacher cannot be converted" in message
    assert unfinished(tmp_path) == []


BAD_TENSORS: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "missing": lambda t: t.pop("blk.0.attn_q.weight"),
    "more": lambda t: t.__setitem__("blk.0.nonsense.weight", np.zeros((4, 4), np.float32)),
    "no embeddings": lambda t: t.pop("token_embd.weight"),
    "shape": lambda t: t.__setitem__("blk.0.attn_q.weight", t["blk.0.attn_q.weight"][:5]),
    "nan": lambda t: t.__setitem__("blk.0.attn_q.weight", t["blk.0.attn_q.weight"] * np.nan),
    "inf": lambda t: t.__setitem__("output_norm.weight", t["output_norm.weight"] * np.inf),
    "ints": lambda t: t.__setitem__(
        "blk.0.attn_q.weight", t["blk.0.attn_q.weight"].astype(np.int32)
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_gguf_tensors(name: str, made: Teacher, tmp_path: Path) -> None:
    arrays = {key: value.copy() for key, value in gguf_tensors(made.model).items()}
    BAD_TENSORS[name](arrays)
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_header(made.model), arrays)
    message = said_by_teacher(tmp_path, source=TeacherSource.gguf, path=str(path))
    assert "m.gguf" in message
    assert unfinished(tmp_path) == []


def test_the_whole_gguf_file_loads(whole_gguf: Path, tmp_path: Path) -> None:
    cfg = TeacherConfig(name="good", source=TeacherSource.gguf, path=str(whole_gguf))
    assert load_teacher(cfg, tmp_path).geometry.num_hidden_layers == 1
