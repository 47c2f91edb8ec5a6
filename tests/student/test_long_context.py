"""A context of 16,384 tokens on a CPU: what it needs beyond a plain activation or two.

Shape letters: T tokens, D model dim, W vocabulary.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from op_cases import rel_rms
from student_helpers import padded, student, tokens
from transformers import DynamicCache
from watching import Watch

import tc.student.mixer as mixer_module
from tc.data import Window
from tc.evaluate.perplexity import ROWS, perplexity
from tc.student.cache import RecurrentLayer
from tc.student.mixer import GatedDeltaNet, MixerForm

D, H, K = 64, 4, 16
SHORT, LONG = 4096, 16384


def needed(T: int) -> int:
    """Bytes that a mixer holds at its peak, its input apart."""
    torch.manual_seed(0)
    mixer, x = GatedDeltaNet(D, H, K, 0, MixerForm()), torch.randn(1, T, D)
    known = {"x": x, **dict(mixer.named_parameters())}
    with torch.no_grad(), Watch(known) as watch:
        mixer(x)
    return watch.peak


def test_what_a_mixer_needs_beyond_its_activations_does_not_grow(monkeypatch) -> None:
    """Beside its output, whose pieces are put together, it needs as much for 4k as for 16k."""
    activation = 4 * D

    def grown() -> float:
        """Activations that each further token costs."""
        return (needed(LONG) - needed(SHORT)) / (LONG - SHORT) / activation

    assert grown() < 2.1
    assert needed(SHORT) < 16 * SHORT * activation
    monkeypatch.setattr(mixer_module, "PIECE", LONG)  # a control: all of it at once
    assert grown() > 8


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_a_text_read_in_pieces_is_the_text(packed: bool, monkeypatch) -> None:
    """With pads on the left, or documents that begin in any piece; and the state at the end."""
    model, (ids, mask) = student("qwen3", "odd"), padded(tokens(101, 70), "left")
    given = {"attention_mask": mask, "use_cache": True}
    if packed:
        places = torch.cat([torch.arange(n) for n in (40, 41, 20)]).expand(2, -1)
        given = {"position_ids": places, "use_cache": False}
    whole = model(ids, **given)
    for size in (33, 64):
        monkeypatch.setattr(mixer_module, "PIECE", size)
        seen = model(ids, **given)
        assert rel_rms(seen.logits[mask.bool()], whole.logits[mask.bool()]) < 1e-5
        if not packed:
            states = [out.cache.layers[1].state for out in (seen, whole)]
            assert rel_rms(*states) < 1e-5
    forgetful = partial(GatedDeltaNet.read_out, model.mixers[1])  # a control
    monkeypatch.setattr(
        model.mixers[1], "read_out", lambda *a, **k: forgetful(*a, **{**k, "state": None})
    )
    wrong = model(ids, **given).logits
    assert rel_rms(wrong[mask.bool()], whole.logits[mask.bool()]) > 1e-3


@pytest.mark.parametrize("which", ["all", "odd"])
@torch.no_grad()
def test_a_cache_of_states_is_as_large_after_any_context(which: str) -> None:
    model = student("llama", which)
    sizes = {}
    for length in (64, 640):
        cache = DynamicCache(config=model.config)
        model(tokens(length)[0], cache=cache, use_cache=True)
        sizes[length] = [
            layer.state.nbytes if isinstance(layer, RecurrentLayer) else layer.keys.nbytes
            for layer in cache.layers
        ]
    for i, (short, long) in enumerate(zip(sizes[64], sizes[640], strict=True)):
        assert long == (short if i in model.mixers else 10 * short)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["all", "odd"])
def test_losses_of_a_long_window_hold_no_logits_of_all_its_tokens(which: str) -> None:
    model = student("llama", which)
    ids = tokens(LONG)[0][0]
    windows = [Window(ids, torch.arange(LONG) > 0)]
    with torch.no_grad(), Watch(dict(model.named_parameters())) as watch:
        found = perplexity(model, windows, 1)
    vocabulary = model.config.vocab_size
    rows = {shape[0] for shape in watch.shapes if len(shape) == 2 and shape[-1] == vocabulary}
    assert found.tokens == LONG - 1 and rows and max(rows) <= ROWS
    assert not any(shape[-2:].count(LONG) > 1 for shape in watch.shapes)  # no T x T either
    with torch.no_grad(), Watch(dict(model.named_parameters())) as plain:  # a control
        model(ids[None, :2048], use_cache=False)
    assert any(shape[-2:] == (2048, vocabulary) for shape in plain.shapes)
