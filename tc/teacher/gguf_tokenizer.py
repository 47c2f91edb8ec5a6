"""A fast tokenizer from the header of a GGUF file: byte-level BPE only.

The pre-tokenizers are those of the original tokenizers, not of transformers' own GGUF reader, which
lacks SmolLM's splitting of digits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tc.errors import TCError
from tc.teacher.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Token types of GGUF that are no ordinary vocabulary."""

LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
QWEN2 = ("qwen2", "deepseek-r1-qwen")
SMOLLM = ("smollm",)
GPT2 = ("gpt-2",)
PRE_TOKENIZERS = (*SMOLLM, *QWEN2, *LLAMA3, *GPT2)

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Qwen2 and Llama 3 cut words; the digits that stay together go in the gap."""


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerFast:
    """Rebuilds the tokenizer of a GGUF file.

    Raises:
        TCError: if it is not byte-level BPE with a known pre-tokenizer, or its lists are damaged.
    """
    from transformers import PreTrainedTokenizerFast

    _check_kind(file)
    special = {
        name: _token(file, f"{key}_token_id")
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    special["pad"] = special["pad"] or special["eos"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend_of(file, special["bos"], special["eos"]),
        **{f"{name}_token": token for name, token in special.items() if token is not None},
        chat_template=file.header.get("tokenizer.chat_template"),
        model_max_length=int(file.model_header["context_length"]),
        clean_up_tokenization_spaces=False,
    )


def _check_kind(file: GgufFile) -> None:
    kind = file.header.get("tokenizer.ggml.model", "none")
    pre = file.header.get("tokenizer.ggml.pre", "none")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise TCError(
            f"{file.path} has a tokenizer of type {kind} with pre-tokenizer {pre}. Allowed: type "
            f"gpt2 (byte-level BPE) with {', '.join(PRE_TOKENIZERS)}. Use teacher.source=hf with "
            "the original model folder."
        )
    _check_lists(file)


def _check_lists(file: GgufFile) -> None:
    tokens = _list(file, "tokens")
    unique, types, merges = len(set(tokens)), len(_list(file, "token_type")), _list(file, "merges")
    rows = int(file.tensors["token_embd.weight"].shape[-1])
    if not (0 < unique == len(tokens) == types <= rows and merges):
        raise TCError(
            f"{file.path} has a damaged tokenizer: {len(tokens)} tokens ({unique} different), "
            f"{types} token types, {len(merges)} merges, {rows} embeddings. Allowed: as many types "
            "as tokens, all different, merges, and no more tokens than embeddings. Get the file "
            "again."
        )


def _list(file: GgufFile, key: str) -> list[Any]:
    values = file.header.get(f"tokenizer.ggml.{key}") or []
    kind = int if key == "token_type" else str
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise TCError(
            f"{file.path} has a damaged tokenizer: tokenizer.ggml.{key} is no list of "
            f"{'numbers' if kind is int else 'texts'}. Get the file again."
        )
    return values


def _token(file: GgufFile, key: str) -> str | None:
    """The token that a header key names by its id, or None where there is no such key."""
    index, tokens = file.header.get(f"tokenizer.ggml.{key}"), _list(file, "tokens")
    if index is not None and not (isinstance(index, int) and 0 <= index < len(tokens)):
        raise TCError(
            f"{file.path}: tokenizer.ggml.{key} is {index}, but there are {len(tokens)} tokens. "
            "Get the file again."
        )
    return None if index is None else tokens[index]


def backend_of(file: GgufFile, bos: str | None, eos: str | None) -> Tokenizer:
    """The tokenizer proper: vocabulary, merges, cutting of words, and what is put around a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pre = file.header["tokenizer.ggml.pre"]
    kinds = list(zip(_list(file, "tokens"), _list(file, "token_type"), strict=True))
    # Unused tokens only fill the embedding up; original tokenizers do not know them.
    vocab = {token: i for i, (token, kind) in enumerate(kinds) if kind != UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in _list(file, "merges")]
    try:
        bpe = models.BPE(vocab, merges, ignore_merges=pre in LLAMA3)
    except Exception as error:  # tokenizers raises bare Exception
        raise TCError(f"{file.path} has damaged merges ({error}). Get the file again.") from error
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    if pre in QWEN2:
        backend.normalizer = normalizers.NFC()
    for token, kind in kinds:
        if kind in (CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL)])
    _put_around(backend, *_wanted_ends(file, bos, eos))
    return backend


def pre_tokenizer(pre: str) -> PreTokenizer:
    """Cuts text to words, as the merges were learned; `pre` is one of `PRE_TOKENIZERS`."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if pre in GPT2:
        return ByteLevel(add_prefix_space=False)
    if pre in SMOLLM:
        # Digits must come first: ByteLevel would otherwise keep a number, and its space, together.
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    pattern = SPLIT % ("{1,3}" if pre in LLAMA3 else "")
    cut = Split(Regex(pattern), behavior="isolated")
    return Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])


def _wanted_ends(file: GgufFile, bos: str | None, eos: str | None) -> tuple[str | None, str | None]:
    # llama.cpp takes a missing flag as true for Llama 3 and as false for every other BPE.
    default = file.header["tokenizer.ggml.pre"] in LLAMA3
    add_bos = file.header.get("tokenizer.ggml.add_bos_token", default)
    add_eos = file.header.get("tokenizer.ggml.add_eos_token", False)
    return (bos if add_bos else None), (eos if add_eos else None)


def _put_around(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Puts tokens before and after each text, where any are given."""
    from tokenizers.processors import TemplateProcessing

    ends = [token for token in (bos, eos) if token is not None]
    if ends:
        backend.post_processor = TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(ends)],
        )
