"""The losses of both stages against plain formulas, and the look at the recurrences."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from recovery_helpers import LAYERS, Task, packed, recipe, teacher
from transformers import PreTrainedModel

from tc.config import KL
from tc.recovery.health import watching
from tc.recovery.losses import IGNORED
from tc.recovery.model import Distillation, next_tokens


def both(task: Task) -> Distillation:
    terms = task.cfg.stage2 if task.name == "stage2" else None
    return Distillation(task.teacher, task.student(), terms, KL.chunk, False).eval()


def test_stage_1_gives_every_converted_layer_its_own_loss_and_gradient(tmp_path: Path) -> None:
    task = Task(tmp_path, teacher(tmp_path), recipe("stage1"), "stage1")
    model, text = both(task), packed(3, 5)
    found = model(text.input_ids, text.position_ids)
    assert set(found) == {"loss", *(f"layer_{i}" for i in LAYERS)}
    seen = {}
    for i in LAYERS:
        module = task.teacher.model.layers[i].self_attn
        module.register_forward_hook(
            lambda m, a, k, y, i=i: seen.update({i: (k["hidden_states"], y[0])}), with_kwargs=True
        )
    with torch.no_grad():
        given = {"input_ids": text.input_ids, "position_ids": text.position_ids}
        task.teacher.model(**given, use_cache=False)
    for i, mixer in model.mixers.items():
        x, target = seen[i]
        with torch.no_grad():
            gap = mixer(x, position_ids=text.position_ids)[0] - target
            without = mixer(x)[0] - target  # the last sequence holds two documents
        plain = gap.square().sum(-1).sqrt().mean() / math.sqrt(gap.shape[-1])
        assert float(found[f"layer_{i}"]) == pytest.approx(float(plain), rel=1e-5)
        assert not torch.allclose(gap[-1], without[-1])
    losses = [float(found[f"layer_{i}"]) for i in LAYERS]
    assert float(found["loss"].detach()) == pytest.approx(sum(losses) / len(losses))
    found["loss"].backward()
    assert untrained(model.student) == []
    assert all(p.grad is None for p in task.teacher.parameters())


def untrained(student: PreTrainedModel) -> list[str]:
    """Parameters that ask for a gradient and have none."""
    asking = [(name, p) for name, p in student.named_parameters() if p.requires_grad]
    return [name for name, p in asking if p.grad is None or not p.grad.any()]


def test_a_layer_that_is_left_out_is_noticed(tmp_path: Path) -> None:
    task = Task(tmp_path, teacher(tmp_path), recipe("stage1"), "stage1")
    model, text = both(task), packed(3, 5)
    model.student.config.gdn["layers"] = LAYERS[:1]
    model(text.input_ids, text.position_ids)["loss"].backward()
    lacking = untrained(model.student)
    assert lacking and all(f"layers.{LAYERS[1]}.self_attn." in name for name in lacking)


def test_stage_2_is_the_kl_divergence_of_the_two_models_on_the_whole_text(tmp_path: Path) -> None:
    cfg = recipe(kl=0.7, ce=0.2, hidden=0.1, temperature=2.0)
    task = Task(tmp_path, teacher(tmp_path), cfg)
    model, text = both(task), packed(3, 5)
    given = {"input_ids": text.input_ids, "position_ids": text.position_ids, "use_cache": False}
    found = model(text.input_ids, text.position_ids)
    with torch.no_grad():
        s = model.student(**given, output_hidden_states=True)
        t = model.teacher(**given, output_hidden_states=True)
    p, q = (F.log_softmax(x.logits.flatten(0, 1) / 2.0, -1) for x in (t, s))
    kl = 4.0 * F.kl_div(q, p, log_target=True, reduction="batchmean")
    targets = next_tokens(text.input_ids, text.position_ids).flatten()
    ce = F.cross_entropy(s.logits.flatten(0, 1), targets, reduction="sum") / len(targets)
    pairs = zip(s.hidden_states[1:], t.hidden_states[1:], strict=True)
    ratios = [((a - b).square().sum(-1) / b.square().sum(-1)).mean() for a, b in pairs]
    hidden = torch.stack(ratios).mean()
    expected = {"kl": kl, "ce": ce, "hidden": hidden, "loss": 0.7 * kl + 0.2 * ce + 0.1 * hidden}
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(float(value), rel=1e-5), name
    nll = model(text.input_ids, text.position_ids, "nll")
    assert int(nll["tokens"]) == int((targets != IGNORED).sum())
    assert float(nll["student"]) == pytest.approx(float(ce) * len(targets), rel=1e-5)


def test_the_stream_alone_can_be_learned_from(tmp_path: Path) -> None:
    task, text = Task(tmp_path, teacher(tmp_path), recipe(kl=0.0, hidden=1.0)), packed(3, 5)
    found = both(task)(text.input_ids, text.position_ids)
    assert set(found) == {"loss", "hidden"} and float(found["loss"].detach()) > 0


def test_nothing_is_predicted_across_documents() -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    positions = torch.tensor([[0, 1, 0, 1]])
    assert next_tokens(ids, positions).tolist() == [[6, IGNORED, 8, IGNORED]]


def test_health_is_what_the_recurrence_does_and_looking_changes_nothing(tmp_path: Path) -> None:
    task = Task(tmp_path, teacher(tmp_path), recipe())
    mixer = next(iter(both(task).mixers.values()))
    x = torch.randn(2, 9, mixer.q_proj.in_features, generator=torch.Generator().manual_seed(0))
    plain = mixer(x)[0]
    with torch.no_grad(), watching({0: mixer}) as found:
        looked = mixer(x)[0]
    assert torch.equal(plain, looked) and "read_out" not in vars(mixer)
    decay = -mixer.log_decay(x).mean((0, 1))
    _, state = mixer.read_out(x, output_final_state=True)
    norms = [float(head.norm()) for row in state for head in row]
    assert found[0]["half_life"] == pytest.approx(float((math.log(2) / decay).median()), rel=1e-5)
    assert found[0]["beta"] == pytest.approx(float(mixer.b_proj(x).sigmoid().mean()), rel=1e-5)
    assert found[0]["state_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-5)
    gate = F.silu(mixer.g_proj(x)).square().mean().sqrt()
    assert found[0]["gate_rms"] == pytest.approx(float(gate), rel=1e-5)
