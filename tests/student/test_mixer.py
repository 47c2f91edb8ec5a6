"""The mixer against its equations written out token by token, and what it reads from masks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from op_cases import rel_rms
from transformers import DynamicCache

from tc.student.hybrid import cast
from tc.student.mixer import (
    GatedDeltaNet,
    MixerForm,
    document_starts,
    inverse_softplus,
    mixer_state,
    token_mask,
)
from tc.student.ops import BACKENDS, chunk

FORMS = {
    "fla": {},
    "no_gate": {"use_gate": False},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "qk_norm_eps": 1e-3},
    "all": {"qkv_bias": True, "o_bias": True, "qk_norm": True, "norm_eps": 1e-2},
}
D, H, K, T = 20, 3, 8, 70


def mixer_of(form: str = "fla", **fields) -> GatedDeltaNet:
    torch.manual_seed(0)
    mixer = GatedDeltaNet(D, H, K, 0, MixerForm(**FORMS[form], **fields))
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 2)
    return mixer


def inputs(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, T, D, generator=torch.Generator().manual_seed(1))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.square().mean() + eps).sqrt()


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum() + 1e-6).sqrt()


def written_out(mixer: GatedDeltaNet, x: torch.Tensor) -> torch.Tensor:
    """METHOD's equations for one sequence `[T, D]`, head by head and token by token, in float64."""
    form, w = mixer.form, {n: p.detach().double() for n, p in mixer.named_parameters()}

    def project(name: str, x_t: torch.Tensor) -> torch.Tensor:
        return w[f"{name}.weight"] @ x_t + w.get(f"{name}.bias", 0)

    states = [torch.zeros(K, K, dtype=torch.float64) for _ in range(H)]
    outputs = []
    for x_t in x.double():
        heads = []
        for h, rows in enumerate(slice(h * K, h * K + K) for h in range(H)):
            q, k, v = (project(f"{n}_proj", x_t)[rows] for n in "qkv")
            if form.qk_norm:
                q = rms_norm(q, w["q_norm.weight"], form.qk_norm_eps)
                k = rms_norm(k, w["k_norm.weight"], form.qk_norm_eps)
            q, k, v = unit(F.silu(q)), unit(F.silu(k)), F.silu(v)
            step = F.softplus(project("a_proj", x_t)[h] + w["dt_bias"][h])
            beta = project("b_proj", x_t)[h].sigmoid()
            S = states[h] * torch.exp(-w["A_log"][h].exp() * step)
            states[h] = S + beta * torch.outer(k, v - S.T @ k)
            o = rms_norm(states[h].T @ q * K**-0.5, w["o_norm.weight"], form.norm_eps)
            heads.append(o * F.silu(project("g_proj", x_t)[rows]) if form.use_gate else o)
        outputs.append(project("o_proj", torch.cat(heads)))
    return torch.stack(outputs)


@pytest.mark.parametrize("backend", ["auto", "loop"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_equations(form: str, backend: str) -> None:
    mixer, x = mixer_of(form, backend=backend), inputs(1)
    expected = written_out(mixer, x[0])
    y, weights = mixer(x)
    assert weights is None
    assert rel_rms(y[0], expected) < 1e-5
    for name, p in mixer.named_parameters():  # every parameter has its say
        kept = p.clone()
        p.mul_(1.5).add_(0.1)
        assert rel_rms(mixer(x)[0][0], expected) > 1e-3, name
        p.copy_(kept)


def test_every_parameter_learns() -> None:
    mixer = mixer_of("all")
    mixer(inputs())[0].square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in mixer.parameters())


@pytest.mark.parametrize("length", [2, 31, 64])
def test_a_short_sequence_learns_in_evaluation_mode(length: int, monkeypatch) -> None:
    """No back end that only goes forward is taken, whatever the mode and the length."""
    x = inputs()[:, :length]

    def gradients(mixer: GatedDeltaNet) -> dict[str, torch.Tensor]:
        mixer(x)[0].square().sum().backward()
        return {n: p.grad for n, p in mixer.named_parameters() if p.grad is not None}

    expected = gradients(mixer_of("all", backend="loop").train())
    assert set(expected) == {n for n, _ in mixer_of("all").named_parameters()}

    def learns() -> bool:
        found = gradients(mixer_of("all").eval())
        return found.keys() == expected.keys() and all(
            rel_rms(found[n], expected[n]) < 1e-4 for n in expected
        )

    assert learns()
    forward_only = torch.no_grad()(BACKENDS["chunk"])  # a control
    monkeypatch.setitem(BACKENDS, "chunk", forward_only)
    assert not learns()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", [-1e4, 1e4])
@pytest.mark.parametrize("step", [-100.0, 100.0])
@pytest.mark.parametrize("rate", [-40.0, 20.0, 60.0])
def test_extreme_gates_stay_finite(
    rate: float, step: float, write: float, dtype: torch.dtype, monkeypatch
) -> None:
    """Decays of exp(-1e28) and of none, write strengths of exactly 0 and 1."""
    mixer, x = mixer_of("all"), inputs().to(dtype)
    with torch.no_grad():
        mixer.A_log.fill_(rate)
        mixer.dt_bias.fill_(step)
        mixer.b_proj.weight.mul_(write)
    y = cast(mixer, dtype)(x)[0]
    y.float().square().sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())
    with torch.no_grad():
        mixer.A_log.fill_(90.0)  # more than float32 can hold of its exponential
        assert mixer(x)[0].isfinite().all()
        monkeypatch.setattr(chunk, "LOWEST", -torch.inf)  # a control
        assert not mixer(x)[0].isfinite().all()


@pytest.mark.slow
def test_compiled_it_is_the_same() -> None:
    """The rule itself is left out of the graph: its loops would be unrolled for every length."""
    mixer, x = mixer_of("all"), inputs()
    compiled = torch.compile(mixer, backend="aot_eager")
    for length in (70, 33):
        part = x[:, :length].clone().requires_grad_()
        other = part.detach().clone().requires_grad_()
        y, plain = compiled(part)[0], mixer(other)[0]
        assert rel_rms(y, plain) < 1e-5
        y.square().sum().backward()
        plain.square().sum().backward()
        assert rel_rms(part.grad, other.grad) < 1e-5
        assert rel_rms(part.grad, other.grad.flip(1)) > 0.1  # a control


@pytest.mark.parametrize("form", FORMS)
def test_parameters_of_a_form(form: str) -> None:
    names = set(mixer_of(form).state_dict())
    made = MixerForm(**FORMS[form])
    fla = {f"{n}_proj.weight" for n in "qkvabgo"} | {"A_log", "dt_bias", "o_norm.weight"}
    biases = {f"{n}_proj.bias" for n in "qkv"} if made.qkv_bias else set()
    biases |= {"o_proj.bias"} if made.o_bias else set()
    norms = {"q_norm.weight", "k_norm.weight"} if made.qk_norm else set()
    gone = set() if made.use_gate else {"g_proj.weight"}
    assert names == (fla | biases | norms) - gone
    assert made.is_fla == (not biases | norms)
    assert MixerForm(**made.to_dict()) == made


def test_fresh_dynamics_are_flas() -> None:
    torch.manual_seed(0)
    mixer = GatedDeltaNet(4, 2000, 1, 0, MixerForm())
    A, dt = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
    assert 0 < A.min() < 0.1 and 15.9 < A.max() < 16
    assert abs(A.mean() - 8) < 0.5
    assert 0.00099 < dt.min() < 0.0011 and 0.09 < dt.max() < 0.1001
    assert abs(dt.log().mean() - math.log(0.01)) < 0.1


@pytest.mark.parametrize("x", [1e-6, 1e-4, 0.05, 1.0, 30.0])
def test_inverse_softplus(x: float) -> None:
    value = torch.tensor(x)
    assert F.softplus(inverse_softplus(value)).item() == pytest.approx(x, rel=1e-5)
    if x < 1e-3:
        assert F.softplus(value.exp().sub(1).log()).item() != pytest.approx(x, rel=1e-5)


def test_mixer_state_is_plain() -> None:
    mixer = mixer_of("all")
    state = mixer_state(mixer)
    assert state.keys() == mixer.state_dict().keys()
    assert not any(x.requires_grad for x in state.values())


def test_bfloat16_keeps_the_decay_in_float32() -> None:
    mixer, x = mixer_of(), inputs()
    half = mixer_of().bfloat16()
    half.A_log.data, half.dt_bias.data = mixer.A_log.data, mixer.dt_bias.data
    assert half.log_decay(x.bfloat16()).dtype == torch.float32
    y = half(x.bfloat16())[0]
    assert y.dtype == torch.bfloat16
    assert rel_rms(y, mixer(x)[0]) < 0.03


# ---- padding, documents and cache ----------------------------------------------------------------

LENGTHS = (70, 5, 33)


def ragged(side: str) -> torch.Tensor:
    """bool `[3, T]` with rows of `LENGTHS` real tokens."""
    place = torch.arange(T)
    place = place.flip(0) if side == "left" else place
    return torch.stack([place < length for length in LENGTHS])


def as_mask(real: torch.Tensor, kind: str, seen: int = 0) -> torch.Tensor | None:
    """What attention modules are given for these real tokens, `seen` of which came before."""
    if kind == "2d":
        return real.long()
    if kind == "2d_float":
        return real.float()
    size = real.shape[1]
    sees = torch.ones(size, size).tril().bool() & real[:, None, None, :]
    sees = sees[:, :, seen:]
    if kind == "4d_bool":
        return sees
    lowest = torch.finfo(torch.bfloat16).min if kind == "4d_lowest" else -torch.inf
    return torch.zeros(sees.shape).masked_fill(~sees, lowest)


KINDS = ("2d", "2d_float", "4d_bool", "4d_lowest", "4d_infinite")


@pytest.mark.parametrize("seen", [0, 30, 69])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_token_mask(kind: str, side: str, seen: int) -> None:
    real = ragged(side)
    found = token_mask(as_mask(real, kind, seen), seen, 3, T - seen)
    assert found.dtype == torch.bool
    assert torch.equal(found, real[:, seen:])


def test_token_mask_of_a_longer_cache() -> None:
    """A preallocated cache has room behind the last token."""
    mask = F.pad(as_mask(ragged("left"), "4d_bool", 30), (0, 20))
    assert torch.equal(token_mask(mask, 30, 3, T - 30), ragged("left")[:, 30:])


def test_token_mask_of_one_row_for_all() -> None:
    assert torch.equal(
        token_mask(torch.tensor([[0, 1]]), 0, 2, 2), torch.tensor([[False, True]] * 2)
    )


def test_no_mask_means_all_real() -> None:
    assert token_mask(None, 0, 2, 5) is None


@pytest.mark.parametrize("mask", [object(), torch.ones(3), torch.ones(2, 3, 4)])
def test_unknown_masks_are_refused(mask: object) -> None:
    with pytest.raises(ValueError, match=r"reads None, \[B, S\].*sdpa, eager or flash_attention_2"):
        token_mask(mask, 0, 2, 3)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padded_rows_equal_rows_alone(kind: str, side: str) -> None:
    mixer, x, real = mixer_of("all"), inputs(3), ragged(side)
    y = mixer(x, attention_mask=as_mask(real, kind))[0]
    unmasked = mixer(x)[0]
    for b in (1, 2):
        alone = mixer(x[b : b + 1, real[b]])[0][0]
        assert rel_rms(y[b, real[b]], alone) < 1e-5
        assert side == "right" or rel_rms(unmasked[b, real[b]], alone) > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_nothing_in_a_pad_reaches_a_gradient(side: str) -> None:
    mixer, real = mixer_of(), ragged(side)
    x = torch.randn(
        *real.shape, mixer.q_proj.in_features, generator=torch.Generator().manual_seed(3)
    )
    found = []
    for pads in (0.0, math.nan):
        mixer.zero_grad()
        out, _ = mixer(x.masked_fill(~real[..., None], pads), attention_mask=real)
        out[real].square().sum().backward()
        found.append([p.grad.clone() for p in mixer.parameters()])
    assert all(torch.equal(*pair) and pair[0].any() for pair in zip(*found, strict=True))


def test_document_starts() -> None:
    packed = torch.tensor([[0, 1, 2, 0, 1, 0], [3, 4, 5, 6, 7, 8]])
    expected = torch.tensor([[1, 0, 0, 1, 0, 1], [1, 0, 0, 0, 0, 0]]).bool()
    assert torch.equal(document_starts(packed, 2), expected)
    assert torch.equal(document_starts(packed[:1], 3), expected[:1].expand(3, -1))
    assert document_starts(packed[1:], 1) is None
    assert document_starts(torch.tensor([[7]]), 1) is None
    assert document_starts(None, 1) is None


@torch.no_grad()
def test_documents_equal_documents_alone() -> None:
    mixer, x, ends = mixer_of(), inputs(1), (0, 30, 31, 65, T)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])[None]
    y, ignored = mixer(x, position_ids=positions)[0], mixer(x)[0]
    alone = torch.cat([mixer(x[:, a:b])[0] for a, b in pairwise(ends)], 1)
    assert rel_rms(y, alone) < 1e-5
    assert rel_rms(ignored, alone) > 1e-3


@pytest.mark.parametrize("pieces", [(70,), (1, 69), (64, 6), (66, 1, 1, 2)])
@torch.no_grad()
def test_pieces_with_a_cache_equal_the_whole(pieces: tuple[int, ...]) -> None:
    """Positions run on, and padding on the left stays padding."""
    mixer, x, real, cache = mixer_of(), inputs(3), ragged("left"), DynamicCache()
    whole = mixer(x, attention_mask=real)[0]
    outputs, seen = [], 0
    for size in pieces:
        mask = as_mask(real[:, : seen + size], "4d_bool", seen)
        places = torch.arange(seen, seen + size)[None]
        part = x[:, seen : seen + size]
        outputs.append(mixer(part, attention_mask=mask, cache=cache, position_ids=places)[0])
        seen += size
        assert cache.get_seq_length() == seen
    assert rel_rms(torch.cat(outputs, 1)[real], whole[real]) < 1e-5
