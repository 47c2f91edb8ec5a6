"""Padding, packed documents, attention kinds and gradients of whole students."""

from __future__ import annotations

import pytest
import torch
from op_cases import rel_rms
from student_helpers import ARCHITECTURES, WHICH, logits, padded, student, tokens
from transformers import PreTrainedModel

each = pytest.mark.parametrize("architecture", ARCHITECTURES)
which_layers = pytest.mark.parametrize("which", WHICH)
TOLERANCE = 1e-5


def row_errors(
    model: PreTrainedModel, rows: list[torch.Tensor], side: str, **inputs
) -> list[float]:
    """How far each padded row's logits are from those of the row alone."""
    ids, mask = padded(rows, side)
    if inputs.pop("places", False):
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    seen = logits(model, ids, **{"attention_mask": mask, **inputs})
    alone = [logits(model, row)[0] for row in rows]
    return [rel_rms(seen[b, mask[b].bool()], alone[b]) for b in range(len(rows))]


@each
@which_layers
@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_batches(architecture: str, which: str, side: str) -> None:
    model, rows = student(architecture, which), tokens(70, 5, 33)
    assert max(row_errors(model, rows, side)) < TOLERANCE
    # Positions that stand still at the pads look like documents; without a cache they are read.
    assert max(row_errors(model, rows, side, places=True, use_cache=False)) < TOLERANCE
    if side == "left":  # a control; on the right pads come too late to matter
        assert min(row_errors(model, rows, side, attention_mask=None)[1:]) > 0.01


@each
@which_layers
def test_a_batch_of_one_is_masked_too(architecture: str, which: str) -> None:
    model, ids = student(architecture, which), tokens(50)[0]
    mask = torch.ones_like(ids)
    mask[:, :13] = 0
    seen, alone = logits(model, ids, attention_mask=mask)[:, 13:], logits(model, ids[:, 13:])
    assert rel_rms(seen, alone) < TOLERANCE
    assert rel_rms(logits(model, ids)[:, 13:], alone) > 0.01


@pytest.mark.parametrize("side", ["left", "right"])
@which_layers
def test_eager_equals_sdpa(which: str, side: str) -> None:
    model, (ids, mask) = student("qwen3", which), padded(tokens(70, 5), side)
    found = {}
    for kind in ("sdpa", "eager"):
        model.set_attn_implementation(kind)
        assert model.config._attn_implementation == kind
        found[kind] = logits(model, ids, attention_mask=mask)[mask.bool()]
        found[f"{kind} alone"] = logits(model, ids[:1])
    assert rel_rms(found["eager"], found["sdpa"]) < TOLERANCE
    assert rel_rms(found["eager alone"], found["sdpa alone"]) < TOLERANCE


@each
@which_layers
def test_packed_documents(architecture: str, which: str) -> None:
    """As `transformers` packs: positions that begin anew, no mask, no cache."""
    model, rows = student(architecture, which), tokens(30, 75, 5)
    ids = torch.cat(rows, 1)
    places = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    alone = torch.cat([logits(model, row) for row in rows], 1)
    seen = logits(model, ids, position_ids=places, use_cache=False)
    assert rel_rms(seen, alone) < TOLERANCE
    assert rel_rms(logits(model, ids, use_cache=False), alone) > 0.01


@which_layers
def test_packed_rows_of_a_batch(which: str) -> None:
    model, lengths = student("llama", which), [(30, 40), (64, 6), (70,)]
    rows = [tokens(*each_row, seed=i) for i, each_row in enumerate(lengths)]
    ids = torch.cat([torch.cat(row, 1) for row in rows])
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    seen = logits(model, ids, position_ids=places, use_cache=False)
    for b, row in enumerate(rows):
        alone = torch.cat([logits(model, document) for document in row], 1)
        assert rel_rms(seen[b : b + 1], alone) < TOLERANCE


def gradients(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> tuple[dict, int]:
    """Gradients of the language-model loss for the mixers, and how often these ran."""
    runs = []
    hooks = [m.register_forward_hook(lambda *_: runs.append(1)) for m in model.mixers.values()]
    model.zero_grad()
    labels = ids.masked_fill(mask == 0, -100)
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    for hook in hooks:
        hook.remove()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    return found, len(runs)


@each
@which_layers
def test_gradient_checkpointing_changes_no_gradient(architecture: str, which: str) -> None:
    model, (ids, mask) = student(architecture, which), padded(tokens(70, 9), "left")
    for mixer in model.mixers.values():
        mixer.requires_grad_(True)
    model.train()
    plain, runs = gradients(model, ids, mask)
    model.gradient_checkpointing_enable()
    checkpointed, twice = gradients(model, ids, mask)
    assert twice == 2 * runs == 2 * len(model.mixers)
    assert plain.keys() == checkpointed.keys() and len(plain) >= 10 * len(model.mixers)
    assert all(p.isfinite().all() and p.any() for p in plain.values())
    assert all(rel_rms(checkpointed[n], plain[n]) < TOLERANCE for n in plain)
    assert not any(p.grad is not None for p in model.parameters() if not p.requires_grad)
