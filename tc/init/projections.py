"""Copying a teacher's projections into a mixer, head by head.

Shape letters: H query heads, J key/value heads, K head dim, D model dim.
"""

from __future__ import annotations

import torch

from tc.config import StudentConfig
from tc.student.mixer import GatedDeltaNet, MixerForm
from tc.teacher.attention import Attention, head_norm


def form_of(attention: Attention, cfg: StudentConfig, backend: str) -> MixerForm:
    """The form of a mixer that carries what its teacher has, as far as `cfg` wants it.

    Args:
        attention: a teacher's attention module.
        cfg: whether biases, norms and the gate are wanted.
        backend: which gated delta rule runs.
    """
    q_norm = head_norm(attention, "q_norm") if cfg.carry_qk_norm else None
    return MixerForm(
        qkv_bias=cfg.carry_bias and attention.q_proj.bias is not None,
        o_bias=cfg.carry_bias and attention.o_proj.bias is not None,
        qk_norm=q_norm is not None,
        use_gate=cfg.use_gate,
        norm_eps=cfg.norm_eps,
        qk_norm_eps=getattr(q_norm, "variance_epsilon", 1e-6),
        backend=backend,
    )


def expand_heads(weight: torch.Tensor, num_heads: int, head_dim: int) -> torch.Tensor:
    """Repeats key/value heads for their query heads: `[J K, ...]` to `[H K, ...]`.

    Whole heads are repeated, each for its group in place: query head h reads key/value head
    h // (H / J), as in grouped-query attention.
    """
    heads = weight.unflatten(0, (-1, head_dim))
    return heads.repeat_interleave(num_heads // len(heads), dim=0).flatten(0, 1)


@torch.no_grad()
def copy_projections(mixer: GatedDeltaNet, attention: Attention) -> None:
    """W_Q, W_K, W_V and W_O of the teacher, with the biases and norms that the mixer's form has.

    Q and O are copied, K and V expanded head by head (arXiv 2606.16429, copy init). The mixer's
    other parameters are left as they are.
    """
    form, H, K = mixer.form, mixer.num_heads, mixer.head_dim
    mixer.q_proj.weight.copy_(attention.q_proj.weight)
    mixer.o_proj.weight.copy_(attention.o_proj.weight)
    for name in ("k_proj", "v_proj"):
        weight = getattr(attention, name).weight
        getattr(mixer, name).weight.copy_(expand_heads(weight, H, K))
    if form.qkv_bias:
        mixer.q_proj.bias.copy_(attention.q_proj.bias)
        for name in ("k_proj", "v_proj"):
            getattr(mixer, name).bias.copy_(expand_heads(getattr(attention, name).bias, H, K))
    if form.o_bias:
        mixer.o_proj.bias.copy_(attention.o_proj.bias)
    for name in ("q_norm", "k_norm") if form.qk_norm else ():
        norm = head_norm(attention, name)
        assert norm is not None
        getattr(mixer, name).weight.copy_(norm.weight)
