"""Loads exported students as FLA's own model on a CPU, under Triton's interpreter; prints JSON.

What is stubbed is what `fla_interpreted.py` stubs, and flash-attn, which needs a GPU: PyTorch's
`scaled_dot_product_attention` takes its place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import fla_interpreted  # before Triton, whose interpreter it turns on
import torch
import torch.nn.functional as F
from op_cases import rel_rms
from student_helpers import tokens
from transformers import AutoModelForCausalLM

T_RECURRENT, T_CHUNK = 20, 65
"""FLA takes another kernel for more than 64 tokens."""

CHUNKED = "llama"
"""The one case in which both kernels run, and that generates: the interpreter is slow."""


def flash_attn_func(q, k, v, causal, window_size):
    """Of `[B, T, H, K]`; a shorter q is the end of k's tokens."""
    assert causal and window_size == (-1, -1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def stub_flash_attn() -> None:
    module = ModuleType("flash_attn")
    module.flash_attn_func = module.flash_attn_varlen_func = flash_attn_func
    sys.modules["flash_attn"] = module
    sys.modules["fla.layers.attn"].flash_attn_func = flash_attn_func


@torch.no_grad()
def errors(student_folder: Path, fla_folder: Path) -> dict[str, object]:
    ours = AutoModelForCausalLM.from_pretrained(student_folder).eval()
    theirs, report = AutoModelForCausalLM.from_pretrained(fla_folder, output_loading_info=True)
    found = {
        "class": f"{type(theirs).__module__}.{type(theirs).__name__}",
        "report": {name: sorted(map(str, what)) for name, what in report.items()},
        "parameters": [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)],
    }
    theirs.eval()
    ids = tokens(T_RECURRENT)[0]
    seen = theirs(ids, use_cache=False).logits
    found["recurrent"] = rel_rms(seen, ours(ids).logits)
    if fla_folder.stem == CHUNKED:
        longer = tokens(T_CHUNK)[0]
        found["chunk"] = rel_rms(theirs(longer, use_cache=False).logits, ours(longer).logits)
        greedy = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        found["generated"] = [model.generate(ids, **greedy).tolist() for model in (ours, theirs)]
        start = theirs(ids[:, :-1], use_cache=True).past_key_values
        step = theirs(ids[:, -1:], past_key_values=start, use_cache=True).logits
        found["step"] = rel_rms(step, ours(ids).logits[:, -1:])
    next(iter(ours.mixers.values())).o_norm.weight.fill_(1)
    found["control"] = rel_rms(seen, ours(ids).logits)
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    cases = sorted(path.stem for path in folder.glob("*.fla"))
    found = {name: errors(folder / name, folder / f"{name}.fla") for name in cases}
    print(json.dumps(found))


if __name__ == "__main__":
    fla_interpreted.stub()
    stub_flash_attn()
    main(Path(sys.argv[1]))
