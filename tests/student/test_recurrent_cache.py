"""The recurrent state's place in a cache of `transformers`."""

from __future__ import annotations

import pytest
import torch
from op_cases import rel_rms
from transformers import DynamicCache, LlamaConfig, StaticCache

from tc.student.cache import RecurrentLayer, recurrent_layer
from tc.student.mixer import GatedDeltaNet, MixerForm


def filled() -> tuple[RecurrentLayer, torch.Tensor]:
    layer, state = RecurrentLayer(), torch.randn(3, 2, 4, 4)
    layer.store(state, 5)
    return layer, state.clone()


def test_counts_and_holds() -> None:
    layer = RecurrentLayer()
    assert layer.state is None
    assert layer.get_seq_length() == 0
    assert layer.get_mask_sizes(7) == (7, 0)
    layer, state = filled()
    layer.store(state + 1, 2)
    assert torch.equal(layer.state, state + 1)
    assert layer.get_seq_length() == 7
    assert layer.get_mask_sizes(1) == (8, 0)


def test_batch_changes() -> None:
    layer, state = filled()
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(layer.state, state[[2, 0, 0]])
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.state, state[[2, 2, 0, 0, 0, 0]])
    layer.batch_select_indices(torch.tensor([0, 5]))
    assert torch.equal(layer.state, state[[2, 0]])
    layer.store(state[:2], 1)
    assert torch.equal(layer.state, state[:2])


def test_changes_of_an_empty_one() -> None:
    layer = RecurrentLayer()
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0]))
    layer.reorder_cache(torch.tensor([0]))
    layer.reset()
    assert layer.state is None


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_after_a_reset_another_batch_fits(batch: int) -> None:
    layer, _ = filled()
    layer.reset()
    assert layer.state is None and layer.get_seq_length() == 0
    layer.store(torch.ones(batch, 2, 4, 4), 1)
    assert torch.equal(layer.state, torch.ones(batch, 2, 4, 4))


def test_keys_and_values_are_refused() -> None:
    with pytest.raises(TypeError, match="recurrent state, not keys and values"):
        RecurrentLayer().update(torch.ones(1), torch.ones(1))


def test_cannot_be_cropped() -> None:
    """What was written cannot be taken back."""
    layer, _ = filled()
    assert not layer.is_croppable
    with pytest.raises(RuntimeError):
        layer.crop(-1)


def test_takes_its_place_in_a_cache() -> None:
    cache = DynamicCache()
    layer = recurrent_layer(cache, 2)
    assert len(cache.layers) == 3
    assert recurrent_layer(cache, 2) is layer is cache.layers[2]
    cache.update(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), 0)
    layer.store(torch.ones(1, 1, 2, 2), 4)
    assert cache.get_seq_length(0) == cache.get_seq_length(2) == 4


def test_masks_of_a_fixed_length_stay_as_long() -> None:
    cache = StaticCache(LlamaConfig(num_hidden_layers=2), max_cache_len=20)
    layer = recurrent_layer(cache, 0)
    layer.store(torch.ones(1, 1, 2, 2), 4)
    assert layer.get_mask_sizes(1) == cache.layers[1].get_mask_sizes(1) == (20, 0)
    assert cache.is_compileable  # else `transformers` leaves the mask out
    assert recurrent_layer(DynamicCache(), 0).get_mask_sizes(1) == (1, 0)


def test_gradients_pass_through_pieces() -> None:
    """A later piece must not overwrite the state that an earlier one is differentiated by."""
    torch.manual_seed(0)
    mixer, x = GatedDeltaNet(8, 2, 4, 0, MixerForm()), torch.randn(2, 9, 8)
    mixer(x)[0].square().sum().backward()
    whole = {n: p.grad.clone() for n, p in mixer.named_parameters()}
    mixer.zero_grad()
    cache = DynamicCache()
    parts = [mixer(part, cache=cache)[0] for part in x.split(3, 1)]
    torch.cat(parts, 1).square().sum().backward()
    assert max(rel_rms(p.grad, whole[n]) for n, p in mixer.named_parameters()) < 1e-5
