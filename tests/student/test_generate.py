"""Generation: the cache changes nothing but the time it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import student_helpers
import torch
from op_cases import rel_rms
from student_helpers import ARCHITECTURES, PAD, WHICH, logits, padded, student, teacher_cfg, tokens
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import CacheLayerMixin, QuantizedLayer

from tc.student.cache import RecurrentLayer
from tc.teacher import load_teacher

each = pytest.mark.parametrize("architecture", ARCHITECTURES)
which_layers = pytest.mark.parametrize("which", WHICH)
NEW = 5


def generated(model: PreTrainedModel, ids: torch.Tensor, **options) -> torch.Tensor:
    """Exactly `NEW` new tokens, greedy unless `options` say otherwise."""
    fixed = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, **{**fixed, "pad_token_id": PAD, **options})[:, ids.shape[1] :]


def by_hand(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Greedy, one whole forward pass a token."""
    prompt = ids.shape[1]
    for _ in range(NEW):
        scores = logits(model, ids, use_cache=False)[:, -1]
        scores[:, model.generation_config.eos_token_id] = -torch.inf
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
    return ids[:, prompt:]


@each
@which_layers
def test_greedy_with_and_without_a_cache(architecture: str, which: str) -> None:
    """Prompts shorter than a chunk of 64, as long, and longer."""
    model = student(architecture, which)
    for ids in tokens(1, 3, 64, 101):
        expected = by_hand(model, ids)
        assert torch.equal(generated(model, ids), expected)
    assert torch.equal(generated(model, ids, use_cache=False), expected)


@which_layers
def test_the_prompt_before_its_last_token_matters(which: str) -> None:
    """A control: a cache that forgets would generate this."""
    model, ids = student("qwen3", which), tokens(70)[0]
    assert not torch.equal(generated(model, ids), generated(model, ids[:, -1:]))


@each
@which_layers
def test_left_padded_rows_generate_as_rows_alone(architecture: str, which: str) -> None:
    model, rows = student(architecture, which), tokens(70, 4, 33)
    ids, mask = padded(rows, "left")
    together = generated(model, ids, attention_mask=mask)
    alone = torch.cat([generated(model, row) for row in rows])
    assert torch.equal(together, alone)
    assert torch.equal(generated(model, ids, attention_mask=mask, use_cache=False), alone)
    one = generated(model, ids[1:2], attention_mask=mask[1:2])  # a mask at batch 1 is read too
    assert torch.equal(one, alone[1:2])
    # A control: pads that are read as text.
    assert not torch.equal(generated(model, ids, attention_mask=torch.ones_like(mask)), alone)


@which_layers
def test_rows_that_end_at_different_times(which: str) -> None:
    """Rows that are done are fed pads until the last one is; none may reach another row."""
    model, rows = student("qwen3", which), tokens(40, 9, 23)
    longest = {"max_new_tokens": 12, "min_new_tokens": 0, "pad_token_id": PAD}
    free = {"eos_token_id": None, **longest}
    alone = [generated(model, row, **free)[0].tolist() for row in rows]
    # What ends the first row at once, the second one later and the third last or not at all.
    ends = {row[place] for row, place in zip(alone, (1, 5, 9), strict=True)}
    ids, mask = padded(rows, "left")
    together = generated(
        model, ids, **{**longest, "eos_token_id": sorted(ends)}, attention_mask=mask
    )
    lengths = []
    for row, seen in zip(alone, together.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        assert seen[:end] == row[:end]
        assert set(seen[end:]) <= {PAD}
        lengths.append(end)
    assert len(set(lengths)) > 1  # else none ended before another
    wrong = together.roll(1, 0).tolist()  # a control: the answers of other rows
    assert any(
        seen[:end] != row[:end] for seen, row, end in zip(wrong, alone, lengths, strict=True)
    )


@which_layers
def test_beams_with_and_without_a_cache(which: str) -> None:
    model, (ids, mask) = student("llama", which), padded(tokens(70, 4), "left")
    options = {"num_beams": 3, "attention_mask": mask}
    beams = generated(model, ids, **options)
    assert torch.equal(beams, generated(model, ids, **options, use_cache=False))
    several = generated(model, ids, **options, num_return_sequences=2)
    assert torch.equal(several[::2], beams)
    assert not torch.equal(several[::2], several[1::2])


@which_layers
def test_samples_of_one_prompt(which: str) -> None:
    model, ids = student("llama", which), tokens(20)[0]
    options = {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(0)
    cached = generated(model, ids, **options)
    torch.manual_seed(0)
    assert torch.equal(cached, generated(model, ids, **options, use_cache=False))
    assert len(cached.unique(dim=0)) > 1


@which_layers
@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "static"},
        {"cache_implementation": "offloaded"},
        {"cache_implementation": "offloaded_static"},
        {"cache_implementation": "quantized"},
        {"prefill_chunk_size": 16},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_other_ways_to_cache(options: dict, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of fixed length, in main memory, in few bits; and a prompt that is read in pieces."""
    kind = options.get("cache_implementation", "")
    model, touched = student("qwen3", which), []
    if kind.startswith("offloaded"):
        touched = _without_a_gpu(monkeypatch)
    elif kind == "quantized":
        touched = _without_quanto(monkeypatch)
    for ids in tokens(3, 70):
        assert torch.equal(generated(model, ids, **options), by_hand(model, ids))
    if kind.startswith(("offloaded", "quantized")):  # else something other was tested
        assert bool(touched) == (which != "all")
    # A control: without its state the answer is another one.
    monkeypatch.setattr(RecurrentLayer, "state", property(lambda self: None))
    assert not torch.equal(generated(model, ids, **options), by_hand(model, ids))


def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets caches move to main memory where they are already; what they moved is told."""

    class Stream:
        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait_stream(self, _: object) -> None:
            pass

    moved: list[str] = []
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: Stream())
    offload = CacheLayerMixin.offload
    monkeypatch.setattr(
        CacheLayerMixin, "offload", lambda self: (moved.append("offload"), offload(self))[1]
    )
    return moved


def _without_quanto(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers of a quantized cache with a quantizer that keeps every bit."""
    used: list[str] = []

    class Exact(QuantizedLayer):
        def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
            used.append("quantize")
            return tensor

        def _dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    monkeypatch.setattr(cache_utils, "QuantoQuantizedLayer", Exact)
    return used


@which_layers
@pytest.mark.parametrize("way", ["lookup", "assistant", "early_exit"])
def test_assisted_generation_is_refused(way: str, which: str) -> None:
    """It takes tokens back, which a recurrent state cannot: an error, not a wrong answer."""
    options = {
        "lookup": {"prompt_lookup_num_tokens": 2},
        "assistant": {"assistant_model": student("qwen3", "none")},
        "early_exit": {"assistant_early_exit": 1},
    }[way]
    with pytest.raises(ValueError, match="cache that can be cropped"):
        generated(student("qwen3", which), tokens(70)[0], **options)
    model = student("qwen3", "none")  # a control: with keys and values alone it works
    ids = tokens(70)[0]
    if way != "early_exit":
        assert torch.equal(generated(model, ids, **options), by_hand(model, ids))


@which_layers
def test_a_student_may_be_the_assistant_of_nobody(which: str) -> None:
    """As the drafting model it must take tokens back as well, and says so where it first has to."""
    with pytest.raises((ValueError, RuntimeError), match=r"can be cropped|`crop` was called"):
        generated(student("qwen3", "none"), tokens(20)[0], assistant_model=student("qwen3", which))


@pytest.mark.parametrize(
    "options",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        {"num_beams": 2, "force_words_ids": [[5]]},
    ],
    ids=["contrastive", "dola", "group_beams", "constrained"],
)
def test_what_transformers_moved_to_the_hub_is_refused_without_trust(options: dict) -> None:
    """Code from the hub runs only where it is asked for by name."""
    with pytest.raises(ValueError, match="requires `trust_remote_code=True`"):
        generated(student("qwen3", "odd"), tokens(20)[0], **options)


@which_layers
def test_continuous_batching_is_refused(which: str) -> None:
    """Blocks of keys and values have no place for a state; every way in says so at once."""
    model, ids = student("qwen3", which), tokens(20)[0]
    with pytest.raises(ValueError, match=r"continuous batching .* take generate"):
        model.generate_batch([ids[0].tolist()])
    with pytest.raises(ValueError, match="continuous batching"):
        generated(model, ids, cache_implementation="paged")
    with pytest.raises(ValueError, match="continuous batching"):
        model.init_continuous_batching()


@each
@which_layers
@torch.no_grad()
def test_prefill_in_pieces_equals_one(architecture: str, which: str) -> None:
    model, ids = student(architecture, which), tokens(101)[0]
    whole = logits(model, ids, use_cache=False)
    for sizes in ((70, 31), (3, 97, 1)):
        cache, pieces = DynamicCache(config=model.config), []
        for piece in ids.split(sizes, 1):
            out = model(piece, cache=cache, use_cache=True)
            assert out.cache is cache
            pieces.append(out.logits)
        assert cache.get_seq_length() == 101
        assert rel_rms(torch.cat(pieces, 1), whole) < 1e-5
        # A control: pieces that know nothing of those before them.
        apart = [logits(model, piece, use_cache=False) for piece in ids.split(sizes, 1)]
        assert rel_rms(torch.cat(apart, 1), whole) > 0.01


@which_layers
@torch.no_grad()
def test_heads_as_wide_as_256_in_groups(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = teacher_cfg("qwen3")
    cfg.model = {**cfg.model, "head_dim": 256}
    wide = load_teacher(cfg, Path("/nowhere")).model
    assert wide.config.num_attention_heads > wide.config.num_key_value_heads
    monkeypatch.setattr(student_helpers, "teacher", lambda architecture: wide)
    model, rows = student("qwen3", which), tokens(70, 4)
    assert {mixer.head_dim for mixer in model.mixers.values()} == {256}
    ids, mask = padded(rows, "left")
    alone = torch.cat([by_hand(model, row) for row in rows])
    assert torch.equal(generated(model, ids, attention_mask=mask), alone)
    short, unmasked = logits(model, rows[1])[0], logits(model, ids)[1, -4:]
    assert rel_rms(logits(model, ids, attention_mask=mask)[1, -4:], short) < 1e-5
    assert rel_rms(unmasked, short) > 0.01  # a control: pads read as text


@which_layers
@torch.no_grad()
def test_padded_prefill_in_pieces(which: str) -> None:
    model, (ids, mask) = student("qwen2", which), padded(tokens(90, 40), "left")
    whole = logits(model, ids, attention_mask=mask, use_cache=False)
    first = model(ids[:, :60], attention_mask=mask[:, :60], use_cache=True)
    rest = model(ids[:, 60:], attention_mask=mask, cache=first.cache).logits
    real = mask.bool()
    seen = torch.cat([first.logits, rest], 1)
    assert rel_rms(seen[real], whole[real]) < 1e-5


@which_layers
def test_a_cache_goes_on_and_is_used_again(which: str) -> None:
    """The answer to a second turn, and the same cache after a reset with another batch."""
    model, (ids, more) = student("mistral", which), tokens(70, 9)
    cache = DynamicCache(config=model.config)
    turn = model.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False, cache=cache)
    longer = torch.cat([turn, more], 1)
    assert torch.equal(generated(model, longer, cache=cache), by_hand(model, longer))
    cache.reset()
    pair = ids.expand(2, -1)
    assert torch.equal(generated(model, pair, cache=cache), by_hand(model, pair))
