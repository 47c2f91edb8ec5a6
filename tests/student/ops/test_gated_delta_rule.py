"""The chunked path against the plain loop in float64: outputs, states and all gradients."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from op_cases import INPUTS, Tensors, make, random_resets, rel_rms, run, worst

from tc.student import ops
from tc.student.ops import BACKENDS, chunk, gated_delta_rule, l2norm

TOLERANCE = 1e-5
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 257, 1000)
CPU_BACKENDS = ("loop", "chunk")
HARD = {
    "plain": {},
    "strong_decay": {"g": -20.0},
    "hardly_any_decay": {"g": -1e-6},
    "writes_nothing": {"beta": 0.0},
    "writes_all": {"beta": 1.0},
    "repeated_keys": {"repeated_keys": True, "beta": 1.0, "g": -1e-6},
}


def truth(inputs: Tensors, **options) -> Tensors:
    return run(inputs, torch.float64, "loop", **options)


def decays_after_writing(q, k, v, g, beta, initial_state, **options):
    """Wrong on purpose: the token's own write is decayed too."""
    q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)
    S, outputs = initial_state, []
    for t in range(v.shape[1]):
        update = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], update)
        S = S * g[:, t, :, None, None].exp()
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("case", HARD)
def test_chunk_equals_loop(T: int, case: str) -> None:
    inputs = make(T, **HARD[case])
    assert worst(run(inputs, torch.float32, "chunk"), truth(inputs)) < (TOLERANCE,)


@pytest.mark.parametrize(("K", "V"), [(8, 8), (24, 8), (8, 128), (128, 64), (64, 128)])
@pytest.mark.parametrize("case", HARD)
def test_chunk_equals_loop_for_all_sizes(case: str, K: int, V: int) -> None:
    inputs = make(257, K, V, **HARD[case])
    # Of one key over and over, written whole and never forgotten, dbeta at K = 128 is a sum that
    # nearly cancels: float32 leaves it a relative 2e-5 in some draws.
    worst_known = 3 * TOLERANCE if case == "repeated_keys" and K == 128 else TOLERANCE
    assert worst(run(inputs, torch.float32, "chunk"), truth(inputs)) < (worst_known,)


@pytest.mark.parametrize("case", HARD)
def test_the_loop_in_float32_is_nearly_as_exact(case: str) -> None:
    """It sums in another order: one key a thousand times over leaves it 4e-5."""
    inputs = make(1000, **HARD[case])
    assert worst(run(inputs, torch.float32, "loop"), truth(inputs)) < (5 * TOLERANCE,)


def test_more_rows_than_a_slab_takes_chunks() -> None:
    inputs = make(70, B=7, H=9, J=3)
    assert chunk.SLAB < 7 * 9
    assert worst(run(inputs, torch.float32, "chunk"), truth(inputs)) < (TOLERANCE,)


@pytest.mark.parametrize("case", HARD)
def test_the_widest_heads_in_groups(case: str) -> None:
    """256 is as wide as FLA's kernels go."""
    inputs = make(70, 256, 256, H=4, J=2, **HARD[case])
    seen, expected = run(inputs, torch.float32, "chunk"), truth(inputs)
    # Of one key over and over the sums that nearly cancel are longer still.
    assert worst(seen, expected) < (5 * TOLERANCE if case == "repeated_keys" else TOLERANCE,)
    swapped = truth({**inputs, "q": inputs["q"].flip(2)})  # a control: each group reads the other's
    assert rel_rms(swapped["o"], expected["o"]) > 0.1


@pytest.mark.parametrize("g", [-1e4, -1e20, -torch.inf])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_decay_to_nothing_at_all(backend: str, g: float, monkeypatch) -> None:
    """g = -inf, what float32 makes of a huge A_log, forgets everything; weak ones stay exact."""
    inputs, finite = make(70), make(70)
    inputs["g"][:, ::9], finite["g"][:, ::9] = g, -1e4
    expected = truth(finite)
    assert worst(run(inputs, torch.float32, backend), expected) < (TOLERANCE,)
    assert worst(run(make(70), torch.float32, backend), expected) > (0.1,)
    if backend == "chunk" and g < -1e4:  # a control
        monkeypatch.setattr(chunk, "LOWEST", -torch.inf)
        assert worst(run(inputs, torch.float32, backend), expected) > (TOLERANCE,)


@pytest.mark.parametrize(("H", "J"), [(6, 1), (6, 2), (6, 3)])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_grouped_heads_are_repeated_head_by_head(backend: str, H: int, J: int) -> None:
    inputs = make(70, H=H, J=J)
    whole = {**inputs, **{n: inputs[n].repeat_interleave(H // J, 2) for n in "qk"}}
    expected = truth(whole)
    for name in ("dq", "dk"):
        expected[name] = expected[name].unflatten(2, (J, -1)).sum(3)
    assert worst(run(inputs, torch.float32, backend), expected) < (TOLERANCE,)
    tiled = {**inputs, **{n: inputs[n].repeat(1, 1, H // J, 1) for n in "qk"}}
    if J > 1:
        assert rel_rms(truth(tiled)["o"], expected["o"]) > 0.1


def test_strong_and_weak_decays_side_by_side() -> None:
    """In one running sum the weak ones would lose their digits."""
    inputs = make(128)
    inputs["g"][:] = -1e-3
    inputs["g"][:, ::2] = -20
    inputs["g"][:, 64] = -1000
    assert worst(run(inputs, torch.float32, "chunk"), truth(inputs)) < (TOLERANCE,)


def test_no_initial_state_is_an_empty_one() -> None:
    inputs = make(70)
    inputs["initial_state"].zero_()
    expected = truth(inputs)
    del inputs["initial_state"], expected["dinitial_state"]
    assert worst(run(inputs, torch.float32, "chunk"), expected) < (TOLERANCE,)
    assert gated_delta_rule(**inputs)[1] is None


def test_a_wrong_order_of_decay_and_write_is_seen() -> None:
    inputs = make(70)
    wrong = run(inputs, torch.float64, "chunk", rule=decays_after_writing)
    right = run(inputs, torch.float32, "chunk")
    # What is left of the initial state is the same in either order.
    assert rel_rms(wrong.pop("dinitial_state"), right["dinitial_state"]) < TOLERANCE
    assert min(rel_rms(wrong[name], right[name]) for name in wrong) > 1000 * TOLERANCE


@pytest.mark.parametrize("with_resets", [False, True])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_gradcheck(backend: str, with_resets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "CHUNK", 3)
    inputs = [x.double().requires_grad_() for x in make(7, 3, 2, B=1, H=2, J=1).values()]
    resets = torch.tensor([[False, False, True, False, False, True, False]])

    def rule(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named = dict(zip(INPUTS, tensors, strict=True))
        return gated_delta_rule(
            **named,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            resets=resets if with_resets else None,
            backend=backend,
        )

    assert torch.autograd.gradcheck(rule, inputs)


def test_bfloat16_inputs_lose_only_the_rounding_of_the_output() -> None:
    """Inside all is float32: the state to 1e-5, the output to bfloat16's rounding (RMS 1.1e-3)."""
    inputs = make(257, K=24)
    inputs |= {n: (inputs[n] / 5).bfloat16().float() for n in "qkv"}
    expected = truth(inputs, use_qk_l2norm_in_kernel=False)
    for backend in CPU_BACKENDS:
        seen = run(inputs, torch.bfloat16, backend, use_qk_l2norm_in_kernel=False)
        assert seen["o"].dtype == torch.bfloat16 and seen["state"].dtype == torch.float32
        assert rel_rms(seen["state"], expected["state"]) < TOLERANCE
        assert rel_rms(seen["o"], expected["o"]) < 1.8e-3
        assert worst(seen, expected) < (5e-3,)
        normed = rel_rms(run(inputs, torch.bfloat16, backend)["o"], truth(inputs)["o"])
        assert normed < 1e-2  # unit-norm q and k are rounded as well, as in FLA


def test_scale_multiplies_the_output() -> None:
    inputs = make(70)
    o, _ = gated_delta_rule(**inputs, scale=1.0)
    assert rel_rms(o * 8**-0.5, gated_delta_rule(**inputs)[0]) < 1e-6


@pytest.mark.parametrize("T", [5, 70])
@pytest.mark.parametrize("backend", ["auto", *CPU_BACKENDS])
def test_step_by_step_equals_the_whole(backend: str, T: int) -> None:
    inputs = make(T)
    whole, last = gated_delta_rule(**inputs, output_final_state=True, backend="chunk")
    state, outputs = inputs.pop("initial_state"), []
    for t in range(T):
        token = {name: x[:, t : t + 1] for name, x in inputs.items()}
        o, state = gated_delta_rule(
            **token, initial_state=state, output_final_state=True, backend=backend
        )
        outputs.append(o)
    assert rel_rms(torch.cat(outputs, 1), whole) < TOLERANCE
    assert rel_rms(state, last) < TOLERANCE


# ---- padding -------------------------------------------------------------------------------------

MASKS = {
    "left": [[0] * 66 + [1] * 4, [0] * 3 + [1] * 67, [1] * 70],
    "right": [[1] * 4 + [0] * 66, [1] * 67 + [0] * 3, [1] * 70],
    "both": [[0] * 10 + [1] * 5 + [0] * 55, [0] + [1] * 65 + [0] * 4, [0] * 64 + [1] * 6],
    "inside": [[1] * 10 + [0] * 50 + [1] * 10, [1, 0] * 35, [0, 1] * 35],
}


def rows_alone(inputs: Tensors, mask: torch.Tensor) -> Tensors:
    """Each row's real tokens alone, put back where they were; zeros at the pads."""
    shapes = {"o": inputs["v"], "state": inputs["initial_state"]}
    shapes |= {f"d{name}": x for name, x in inputs.items()}
    placed = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in shapes.items()}
    options, draw = {"use_qk_l2norm_in_kernel": True}, torch.Generator().manual_seed(1)
    weights = [torch.randn(placed[n].shape, generator=draw) for n in ("o", "state")]
    for b, real in enumerate(mask):
        row = {
            n: (x[b : b + 1] if n == "initial_state" else x[b : b + 1, real]).double()
            for n, x in inputs.items()
        }
        for x in row.values():
            x.requires_grad_()
        o, state = gated_delta_rule(**row, **options, output_final_state=True, backend="loop")
        ((o * weights[0][b, real]).sum() + (state * weights[1][b]).sum()).backward()
        placed["o"][b, real], placed["state"][b] = o[0].detach(), state[0].detach()
        for name, x in row.items():
            spot = b if name == "initial_state" else (b, real)
            placed[f"d{name}"][spot] = x.grad[0]
    return placed


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("side", MASKS)
def test_padded_rows_equal_rows_alone(side: str, backend: str) -> None:
    inputs, mask = make(70, B=3), torch.tensor(MASKS[side]).bool()
    alone = rows_alone(inputs, mask)
    assert worst(run(inputs, torch.float32, backend, mask=mask), alone) < (TOLERANCE,)
    unmasked = run(inputs, torch.float32, backend)
    assert rel_rms(unmasked["state"], alone["state"]) > 0.01
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][~mask] = float("nan")
    assert worst(run(inputs, torch.float32, backend, mask=mask), alone) < (TOLERANCE,)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_pads_never_decay_the_state(backend: str) -> None:
    inputs = make(70, g=-20.0)
    mask = torch.zeros(2, 70, dtype=torch.bool)
    o, state = gated_delta_rule(**inputs, mask=mask, output_final_state=True, backend=backend)
    assert torch.equal(state, inputs["initial_state"])
    assert not o.any()


# ---- documents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [7, 64, 130])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_documents_equal_documents_alone(backend: str, T: int) -> None:
    inputs, resets = make(T), random_resets(2, T)
    expected = truth(inputs, resets=resets)
    assert worst(run(inputs, torch.float32, backend, resets=resets), expected) < (TOLERANCE,)
    ignored = run(inputs, torch.float32, backend)
    assert rel_rms(ignored["o"], expected["o"]) > 0.01
    for b in range(2):
        starts = [0, *resets[b, 1:].nonzero().flatten().add(1).tolist(), T]
        for start, end in pairwise(starts):
            part = {n: x[b : b + 1, start:end].double() for n, x in inputs.items() if n[0] != "i"}
            if not resets[b, start]:
                part["initial_state"] = inputs["initial_state"][b : b + 1].double()
            o, state = gated_delta_rule(
                **part, use_qk_l2norm_in_kernel=True, output_final_state=True, backend="loop"
            )
            assert rel_rms(expected["o"][b, start:end], o[0]) < 1e-12
        assert rel_rms(expected["state"][b], state[0]) < 1e-12


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_reset_at_the_first_token_drops_the_initial_state(backend: str) -> None:
    inputs = make(9)
    resets = torch.zeros(2, 9, dtype=torch.bool)
    resets[0, 0] = True
    o, _ = gated_delta_rule(**inputs, resets=resets, backend=backend)
    inputs["initial_state"][0] = 0
    assert torch.equal(o, gated_delta_rule(**inputs, backend=backend)[0])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_padding_and_documents_together(backend: str) -> None:
    inputs, resets = make(130), random_resets(2, 130)
    mask = torch.rand(2, 130, generator=torch.Generator().manual_seed(3)) < 0.8
    options = {"mask": mask, "resets": resets}
    assert worst(run(inputs, torch.float32, backend, **options), truth(inputs, **options)) < (1e-5,)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mask", "resets"])
def test_flags_are_bool(name: str) -> None:
    """Half a reset has no meaning, and ~1 is -2."""
    with pytest.raises(ValueError, match=rf"{name} is torch.float32; wanted torch.bool"):
        gated_delta_rule(**make(7), **{name: torch.ones(2, 7)})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q", (2, 7, 2, 9)),
        ("k", (2, 7, 1, 8)),
        ("v", (2, 7, 3, 16)),
        ("v", (2, 6, 2, 16)),
        ("v", (2, 7, 32)),
        ("v", (2, 7, 2, 0)),
        ("q", (2, 7, 0, 8)),
        ("g", (2, 7, 2, 1)),
        ("beta", (2, 7)),
        ("initial_state", (2, 2, 16, 8)),
        ("mask", (2, 6)),
        ("mask", (7,)),
        ("resets", (1, 7)),
    ],
)
def test_shapes_that_do_not_fit_are_named(name: str, shape: tuple[int, ...]) -> None:
    inputs = make(7)
    wrong = torch.ones(shape, dtype=torch.bool if name in ("mask", "resets") else torch.float32)
    with pytest.raises(ValueError, match=r"does not fit.*wanted") as error:
        gated_delta_rule(**{**inputs, name: wrong})
    assert f"{name} {list(shape)}" in str(error.value)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend='triton'; allowed: auto, loop, chunk, fla"):
        gated_delta_rule(**make(3), backend="triton")


@pytest.mark.parametrize(("T", "expected"), [(1, "loop"), (2, "chunk")])
def test_auto_on_a_cpu(T: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name, rule in list(BACKENDS.items()):
        spy = lambda *args, name=name, rule=rule: (seen.append(name), rule(*args))[1]  # noqa: E731
        monkeypatch.setitem(BACKENDS, name, spy)
    gated_delta_rule(**make(T))
    assert seen == [expected]


def test_a_gpu_without_fla_takes_plain_pytorch_and_says_so(monkeypatch) -> None:
    """The choice alone, which looks at no more of a tensor than these."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ops._has_fla.cache_clear()
    one, many = (SimpleNamespace(is_cuda=True, shape=(2, T, 3, 4)) for T in (1, 7))
    with pytest.warns(UserWarning, match="flash-linear-attention is not installed"):
        assert ops._choose("auto", many) == "chunk"
    assert ops._choose("auto", one) == "loop"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    ops._has_fla.cache_clear()
    assert ops._choose("auto", many) == ops._choose("auto", one) == "fla"
    ops._has_fla.cache_clear()


def test_l2norm_is_flas() -> None:
    """The epsilon is under the root, so a zero stays zero."""
    x = torch.randn(5, 8, dtype=torch.float64)
    assert rel_rms(l2norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()) < 1e-15
    assert not l2norm(torch.zeros(2, 8)).any()
    assert l2norm(x.bfloat16()).dtype == torch.bfloat16


def test_autocast_does_not_reach_the_products() -> None:
    inputs = make(70)
    with torch.autocast("cpu", torch.bfloat16):
        seen = run(inputs, torch.float32, "chunk")
    assert worst(seen, truth(inputs)) < (TOLERANCE,)


def test_the_gradient_can_be_taken_twice() -> None:
    inputs = {name: x.requires_grad_() for name, x in make(70).items()}
    o, _ = gated_delta_rule(**inputs, backend="chunk")
    first, second = (
        torch.autograd.grad(o.sum(), list(inputs.values()), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
