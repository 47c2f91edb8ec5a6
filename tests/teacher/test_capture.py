"""What a capture reports is what the teacher computed, and the teacher is left as it was.

Shape letters: B batch, T tokens, H query heads, J key/value heads, K head dim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_teacher_configs import RANDOM, composed
from transformers import PreTrainedModel

from tc.teacher import load_teacher
from tc.teacher.capture import capture, capturing

B, T = 2, 24
KINDS = ("plain", "left", "right", "packed")


class Recorder:
    """Keeps a copy of all that it is told."""

    def __init__(self) -> None:
        self.x: dict[int, torch.Tensor] = {}
        self.attention: dict[int, tuple[Any, ...]] = {}
        self.context: dict[int, torch.Tensor] = {}

    def on_input(self, layer: int, hidden_states: torch.Tensor) -> None:
        self.x[layer] = hidden_states.clone()

    def on_attention(self, layer: int, query, key, mask, scaling: float) -> None:
        mask = None if mask is None else mask.clone()
        self.attention[layer] = (query.clone(), key.clone(), mask, scaling)

    def on_context(self, layer: int, context: torch.Tensor) -> None:
        self.context[layer] = context.clone()

    def on_final(self, hidden_states: torch.Tensor) -> None:
        self.final = hidden_states.clone()


class Failing(Recorder):
    """Gives up in the second layer."""

    def on_attention(self, layer: int, *_: Any) -> None:
        if layer == 1:
            raise RuntimeError("enough")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedModel]:
    cache = tmp_path_factory.mktemp("cache")
    return {name: load_teacher(composed(name), cache).model for name in RANDOM}


def batch(kind: str) -> dict[str, torch.Tensor]:
    """Token ids, and the padding mask or the positions of packed documents that go with them."""
    ids = torch.randint(0, 256, (B, T), generator=torch.Generator().manual_seed(1))
    made = {"input_ids": ids}
    if kind == "packed":
        lengths = [(T,), (9, 15)]
        made["position_ids"] = torch.stack(
            [torch.cat([torch.arange(n) for n in row]) for row in lengths]
        )
    elif kind != "plain":
        made["attention_mask"] = torch.ones(B, T, dtype=torch.long)
        made["attention_mask"][1, slice(0, 6) if kind == "left" else slice(T - 6, T)] = 0
    return made


def allowed(kind: str) -> torch.Tensor:
    """Which key each query may see, bool `[B, T, T]`, said in another way than the teacher does."""
    made = batch(kind)
    sees = torch.ones(T, T, dtype=torch.bool).tril().repeat(B, 1, 1)
    if kind == "packed":
        sees[1, 9:, :9] = False
    for row in range(B) if "attention_mask" in made else ():
        sees[row, :, made["attention_mask"][row] == 0] = False
    return sees


def run_plain(model: PreTrainedModel, kind: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Last hidden states and every attention module's output, without any capture."""
    said: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda *args: said.append(args[-1][0].clone()))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        last = model.model(**batch(kind), use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    return last, said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RANDOM)
def test_captured_run_is_the_plain_run(models, name: str, kind: str) -> None:
    model, recorder, seen = models[name], Recorder(), []
    plain, said = run_plain(model, kind)
    hook = model.model.register_forward_hook(lambda *args: seen.append(args[-1].last_hidden_state))
    capture(model, observer=recorder, **batch(kind))
    hook.remove()
    torch.testing.assert_close(seen[0], plain, rtol=0, atol=0, equal_nan=True)
    assert sorted(recorder.x) == sorted(recorder.context) == list(range(len(said)))
    for i, output in enumerate(said):
        again = model.model.layers[i].self_attn.o_proj(recorder.context[i])
        torch.testing.assert_close(again, output, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RANDOM)
def test_query_key_and_mask_are_the_ones_that_were_used(models, name: str, kind: str) -> None:
    model, recorder = models[name], Recorder()
    capture(model, observer=recorder, **batch(kind))
    real = allowed(kind).diagonal(dim1=1, dim2=2)
    for i, layer in enumerate(model.model.layers):
        q, k, mask, scaling = recorder.attention[i]
        assert (mask is None) == (kind == "plain")
        if mask is not None:
            assert mask.dtype == torch.bool
            assert torch.equal(mask[:, 0].expand(B, T, T)[real], allowed(kind)[real])
        v = layer.self_attn.v_proj(recorder.x[i]).unflatten(-1, (k.shape[1], -1)).transpose(1, 2)
        context = recorder.context[i][real].double()
        group = q.shape[1] // k.shape[1]
        right = attend(q, *(x.repeat_interleave(group, 1) for x in (k, v)), scaling, kind)
        torch.testing.assert_close(right[real], context, rtol=1e-4, atol=1e-4)
        # Wrong on purpose: no scaling, and the heads of another group.
        for k_, v_, factor in ((k, v, 1.0), (k.flip(1), v, scaling)):
            wrong = attend(q, *(x.repeat_interleave(group, 1) for x in (k_, v_)), factor, kind)
            if factor != scaling or k.shape[1] > 1:
                assert (wrong[real] - context).norm() > 0.1 * context.norm()


def attend(q, k, v, scaling: float, kind: str) -> torch.Tensor:
    """Softmax attention in float64 with every head's own key, `[B, T, H K]`."""
    scores = (q.double() @ k.double().mT * scaling).masked_fill(~allowed(kind)[:, None], -torch.inf)
    return (scores.softmax(-1) @ v.double()).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", RANDOM)
def test_x_is_the_projections_input(models, name: str) -> None:
    model, recorder, inputs = models[name], Recorder(), []
    hooks = [
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for layer in model.model.layers
    ]
    capture(model, observer=recorder, **batch("packed"))
    for hook in hooks:
        hook.remove()
    assert all(torch.equal(recorder.x[i], x) for i, x in enumerate(inputs)) and inputs


def hooks_of(model: PreTrainedModel) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("observer", [Recorder(), Failing()], ids=["done", "failed"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_teacher_is_left_as_it_was(models, implementation: str, observer: Recorder) -> None:
    model = models["random_qwen2"]
    model.set_attn_implementation(implementation)
    try:
        before, hooks = run_plain(model, "left")[0], hooks_of(model)
        if isinstance(observer, Failing):
            with pytest.raises(RuntimeError, match="enough"):
                capture(model, observer=observer, **batch("left"))
        else:
            capture(model, observer=observer, **batch("left"))
        assert model.config._attn_implementation == implementation
        assert hooks_of(model) == hooks
        assert torch.equal(run_plain(model, "left")[0], before)
    finally:
        model.set_attn_implementation("sdpa")


def test_an_open_context_reports_any_forward(models) -> None:
    model, recorder = models["random_llama"], Recorder()
    with capturing(model, recorder), torch.no_grad():
        logits = model(**batch("packed")).logits
    with torch.no_grad():
        assert torch.equal(logits, model(**batch("packed")).logits)
    assert sorted(recorder.attention) == [0, 1, 2]


def test_nothing_keeps_a_graph(models) -> None:
    model, recorder = models["random_llama"], Recorder()
    model.requires_grad_(True)
    capture(model, observer=recorder, **batch("plain"))
    model.requires_grad_(False)
    assert not any(x.requires_grad for x in (*recorder.x.values(), *recorder.context.values()))
