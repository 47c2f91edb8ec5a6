"""Caches counted by hand, tokens against whole passes, and times that are taken in turns."""

from __future__ import annotations

import pytest
import torch
from student_helpers import ARCHITECTURES, student, teacher
from transformers import PreTrainedModel

from tc.config import GenerationConfig
from tc.evaluate import run_generation
from tc.evaluate.generation import Decoder, Reader, cache_bytes, filled_cache
from tc.student.mixer import GatedDeltaNet

CFG = GenerationConfig(contexts=[16, 24], tokens=3, repeats=2, warm_up=1)


def bytes_by_hand(model: PreTrainedModel, context: int) -> int:
    """float32: keys and values of each head and token, or a square state of each head."""
    total = 0
    for layer in model.model.layers:
        mixer = layer.self_attn
        if isinstance(mixer, GatedDeltaNet):
            total += 4 * mixer.num_heads * mixer.head_dim**2
        else:
            total += 4 * 2 * model.config.num_key_value_heads * mixer.head_dim * context
    return total


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("which", ["none", "odd", "all"])
def test_cache_bytes_equal_a_count_by_hand(architecture: str, which: str) -> None:
    model = student(architecture, which)
    for context in (16, 24):
        reader = Reader(model, context, seed=0)
        reader.step()
        assert cache_bytes(reader.cache) == bytes_by_hand(model, context)
        assert cache_bytes(filled_cache(model, context)) == bytes_by_hand(model, context)
        assert reader.cache.get_seq_length() == context


def test_half_precision_halves_keys_and_values() -> None:
    model = student("llama", "odd")
    whole = cache_bytes(filled_cache(model, 16))
    states = bytes_by_hand(model, 0)
    halved = student("llama", "odd").to(torch.bfloat16)
    reader = Reader(halved, 16, seed=0)
    reader.step()
    size = cache_bytes(reader.cache)
    assert size == cache_bytes(filled_cache(halved, 16)) == states + (whole - states) // 2


@torch.no_grad()
def test_tokens_are_those_of_whole_passes() -> None:
    model = student("qwen3", "odd")
    reader = Reader(model, 20, seed=1)
    for _ in range(2):  # a second reading starts from nothing
        reader.step()
    decoder, ids, written = Decoder(model, reader.cache), reader.ids, []
    for _ in range(4):
        ids = torch.cat([ids, decoder.ids], 1)
        decoder.step()
        assert decoder.ids[0, 0] == model(ids).logits[0, -1].argmax()
        written.append(int(decoder.ids))
    fresh = Decoder(model, filled_cache(model, 20))  # the control: another past, other tokens
    for _ in written:
        fresh.step()
    assert int(fresh.ids) != written[-1]


def test_results_of_every_model_and_context() -> None:
    models = {"teacher": teacher("llama"), "student": student("llama", "all")}
    told: list[tuple[int, int]] = []
    results = run_generation(models, CFG, 0, lambda *seen: told.append(seen))
    assert told == [(1, 2), (2, 2)]
    for name, model in models.items():
        found = {(r.metric, r.context): r for r in results[name]}
        assert len(found) == 6
        for context in (16, 24):
            # Of the context alone, not of the tokens that were written after it.
            size = found["cache_bytes", context]
            assert size.value == bytes_by_hand(model, context) and size.samples is None
            for metric, samples in (
                ("prefill_tokens_per_second", 2),
                ("decode_tokens_per_second", 3),
            ):
                result = found[metric, context]
                assert result.value > 0 and result.samples == samples
                assert (result.measure, result.task) == ("generation", "one_sequence")


def test_speeds_follow_from_median_times_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still but for what steps add to it."""
    clock, order = [0.0], []
    took = {"Reader": iter([9, 9, 2, 4, 3, 6]), "Decoder": iter([9, 9, 5, 1, 1, 1, 7, 1])}

    def step(self: Reader | Decoder) -> None:
        kind = type(self).__name__
        order.append((kind, self.model is models["teacher"]))
        clock[0] += next(took[kind])

    models = {"teacher": teacher("llama"), "student": student("llama", "all")}
    for kind in (Reader, Decoder):
        monkeypatch.setattr(kind, "step", step)
    monkeypatch.setattr("tc.evaluate.generation.cache_bytes", lambda cache: 0)
    monkeypatch.setattr("tc.meter.time.perf_counter", lambda: clock[0])
    cfg = GenerationConfig(contexts=[16], tokens=3, repeats=2, warm_up=1)
    results = run_generation(models, cfg, 0)
    speeds = {name: [r.value for r in found[:2]] for name, found in results.items()}
    assert speeds["teacher"] == [16 / 2.5, 1 / 5]
    assert speeds["student"] == [16 / 5, 1 / 1]
    assert [is_teacher for _, is_teacher in order] == [True, False] * 7
