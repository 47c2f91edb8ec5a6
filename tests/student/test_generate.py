"""Generation: the cache changes nothing but the time it takes."""

from __future__ import annotations

import pytest
import torch
from op_cases import rel_rms
from student_helpers import ARCHITECTURES, PAD, WHICH, logits, padded, student, tokens
from transformers import DynamicCache, PreTrainedModel

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
    "options", [{"cache_implementation": "static"}, {"prefill_chunk_size": 16}]
)
def test_other_ways_to_cache(options: dict, which: str) -> None:
    """A cache of fixed length, and a prompt that is read in pieces."""
    model = student("qwen3", which)
    for ids in tokens(3, 70):
        assert torch.equal(generated(model, ids, **options), by_hand(model, ids))


@which_layers
def test_assisted_generation_is_refused(which: str) -> None:
    """It takes tokens back, which a recurrent state cannot: an error, not a wrong answer."""
    with pytest.raises(ValueError, match="cache that can be cropped"):
        generated(student("qwen3", which), tokens(70)[0], prompt_lookup_num_tokens=2)


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
