"""A calibration on disk is what the teacher says in a plain forward pass, or there is none."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from composing import group
from transformers import PreTrainedModel

from tc.artifacts import Manifest, load_tensors, writing
from tc.data import Packed
from tc.errors import TCError
from tc.stats import AttentionStatistics, Calibration, LayerBatch, calibrate
from tc.stats.calibrate import BATCH, PARTS
from tc.teacher import load_teacher
from tc.teacher.capture import capture

T = 20


def teacher(name: str, *overrides: str) -> PreTrainedModel:
    return load_teacher(group("teacher", name, *overrides), Path()).model


def packed(num: int, seed: int) -> Packed:
    ids = torch.randint(0, 256, (num, T), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(T).repeat(num, 1)
    positions[-1] = torch.cat([torch.arange(7), torch.arange(T - 7)])
    return Packed(ids, positions)


PACKED = {"calibration": packed(BATCH + 1, seed=1), "selection": packed(2, seed=2)}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return teacher("random_qwen3")


@pytest.fixture(scope="module")
def finished(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    folder = tmp_path_factory.mktemp("calibration")
    seen: list[int] = []
    counts = calibrate(model, PACKED, folder, seen.append)
    assert counts == {"calibration_tokens": (BATCH + 1) * T, "selection_tokens": 2 * T}
    assert sum(seen) == sum(counts.values())
    return Calibration(folder)


def heard(model: PreTrainedModel, tokens: Packed) -> Iterator[LayerBatch]:
    """What each attention module and its o_proj are given in one plain forward pass."""
    xs, contexts = [], []
    hooks = []
    for layer in model.model.layers:
        q_proj, o_proj = layer.self_attn.q_proj, layer.self_attn.o_proj
        hooks.append(q_proj.register_forward_pre_hook(lambda _, args: xs.append(args[0])))
        hooks.append(o_proj.register_forward_pre_hook(lambda _, args: contexts.append(args[0])))
    with torch.no_grad():
        model.model(input_ids=tokens.input_ids, position_ids=tokens.position_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for x, context in zip(xs, contexts, strict=True):
        yield LayerBatch(x, context, tokens.position_ids == 0)


@pytest.mark.parametrize("part", PARTS)
def test_activations_are_those_of_a_plain_forward(model, finished, part: str) -> None:
    for i, want in enumerate(heard(model, PACKED[part])):
        got = finished.layer(i)[part]
        torch.testing.assert_close(got.x, want.x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.context, want.context, rtol=1e-5, atol=1e-5)
        assert torch.equal(got.starts, want.starts) and got.starts.sum() == len(got) + 1
    # Wrong on purpose: without positions, the second document of the last sequence sees the first.
    blind = Packed(PACKED[part].input_ids, torch.arange(T).expand(len(want), T))
    *_, wrong = heard(model, blind)
    assert not torch.allclose(wrong.context[-1], want.context[-1], atol=1e-2)
    assert torch.allclose(wrong.context[0], want.context[0], atol=1e-4)


class Gather(AttentionStatistics):
    """Statistics as a capture's observer."""

    on_attention = AttentionStatistics.add

    def on_input(self, *_: object) -> None: ...

    def on_context(self, *_: object) -> None: ...

    def on_final(self, *_: object) -> None: ...


def gathered(model: PreTrainedModel, *parts: str) -> dict[str, torch.Tensor]:
    config = model.config
    statistics = Gather(config.num_hidden_layers, config.num_attention_heads)
    for part in parts:
        tokens = PACKED[part]
        capture(model, tokens.input_ids, statistics, position_ids=tokens.position_ids)
    return statistics.means()


def test_statistics_come_from_calibration_tokens_alone(model, finished) -> None:
    want, wrong = gathered(model, "calibration"), gathered(model, *PARTS)
    for i in range(model.config.num_hidden_layers):
        for name, value in finished.statistics(i).items():
            torch.testing.assert_close(value, want[name][i], rtol=1e-5, atol=1e-8)
            assert not torch.allclose(value, wrong[name][i], rtol=1e-4)


def test_other_selection_tokens_leave_the_statistics_alone(model, finished, tmp_path) -> None:
    calibrate(model, {**PACKED, "selection": packed(3, seed=9)}, tmp_path)
    for name, value in Calibration(tmp_path).statistics(0).items():
        assert torch.equal(value, finished.statistics(0)[name])


def test_half_precision_teacher(tmp_path) -> None:
    model = teacher("random_llama", "teacher.dtype=bfloat16")
    calibrate(model, PACKED, tmp_path)
    parts = Calibration(tmp_path).layer(1)
    assert parts["calibration"].x.dtype == torch.bfloat16
    wide = parts["selection"].to("cpu")
    assert wide.x.dtype == wide.context.dtype == torch.float32 and wide.starts.dtype == torch.bool
    # In batches as they were run: bfloat16 rounds otherwise for other shapes.
    want = list(heard(model, PACKED["selection"]))[1]
    torch.testing.assert_close(wide.context, want.context.float(), rtol=0.02, atol=0.02)
    exact = gathered(model.float(), "calibration")
    for name, value in Calibration(tmp_path).statistics(0).items():
        torch.testing.assert_close(value, exact[name][0], rtol=0.05, atol=0.02)


def test_a_layer_batch_is_cut_by_sequence() -> None:
    batch = LayerBatch(torch.arange(6.0).view(3, 2, 1), torch.zeros(3, 2, 4), torch.ones(3, 2) > 0)
    assert len(batch) == 3 and len(batch[1:]) == 2
    assert batch[1:2].x.flatten().tolist() == [2, 3] and batch[1:2].starts.shape == (1, 2)


def attempt(model: PreTrainedModel, folder: Path, progress=lambda tokens: None) -> None:
    with writing(folder, Manifest("calibrate", {})) as fresh:
        calibrate(model, PACKED, fresh, progress)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_nothing(model, tmp_path, error: type[BaseException]) -> None:
    def stop(tokens: int) -> None:
        assert any(tmp_path.rglob("layer_*.safetensors"))  # it had begun to write
        raise error("stop")

    with pytest.raises(error):
        attempt(model, tmp_path / "here", stop)
    assert list(tmp_path.iterdir()) == []
    assert not [f for f in psutil.Process().open_files() if str(tmp_path) in f.path]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_teacher_that_is_not_finite_is_an_error(tmp_path, value: float) -> None:
    broken = teacher("random_qwen2")
    broken.model.layers[1].self_attn.q_proj.weight[0, 0] = value
    with pytest.raises(TCError, match=r"not finite in layers \[1"):
        attempt(broken, tmp_path / "here")
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_finite_are_found_when_read(tmp_path) -> None:
    broken = teacher("random_qwen2")
    broken.model.layers[3].self_attn.v_proj.weight[0, 0] = math.nan
    calibrate(broken, PACKED, tmp_path)  # the last layer's scores know nothing of its values
    Calibration(tmp_path).layer(2)
    with pytest.raises(TCError, match="'calibration_context' hold NaN or infinity in layer 3"):
        Calibration(tmp_path).layer(3)


def test_a_disk_without_room_is_found_before_anything_runs(model, tmp_path, monkeypatch) -> None:
    tokens = (BATCH + 3) * T
    width = model.config.hidden_size + model.config.num_attention_heads * model.config.head_dim
    behind = tokens * model.config.hidden_size * 4
    needed = tokens * width * 4 * model.config.num_hidden_layers + behind
    free = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(TCError, match=r"calibration needs .* [kG]B") as caught:
        attempt(model, tmp_path / "here", lambda tokens: pytest.fail("the teacher ran"))
    assert "data.calibration_tokens" in str(caught.value) and list(tmp_path.iterdir()) == []
    free.free = needed
    attempt(model, tmp_path / "here")
    held = load_tensors(tmp_path / "here" / "layer_000.safetensors")
    total = sum(x.numel() * x.element_size() for x in held.values())
    assert total * model.config.num_hidden_layers + behind == needed
