"""What a student keeps of its teacher, in memory."""

from __future__ import annotations

import pytest
import torch
from student_helpers import ARCHITECTURES, layers_of, logits, student, teacher, tokens

from tc.student.hybrid import CLASSES, make_mixer
from tc.student.mixer import GatedDeltaNet

each = pytest.mark.parametrize("architecture", ARCHITECTURES)
LONG = 300
"""Beyond the 256 tokens up to which the Llama's scaled rotary is the plain one."""


@each
def test_nothing_converted_is_the_teacher(architecture: str) -> None:
    made, ids = student(architecture, "none"), tokens(LONG)[0]
    assert made.mixers == {}
    assert torch.equal(logits(made, ids), logits(teacher(architecture), ids))


@each
def test_kept_weights_are_the_teachers(architecture: str) -> None:
    made, source = student(architecture, "odd"), teacher(architecture)
    converted = tuple(f"model.layers.{i}.self_attn." for i in layers_of(architecture, "odd"))
    theirs = {k: v for k, v in source.state_dict().items() if not k.startswith(converted)}
    ours = {k: v for k, v in made.state_dict().items() if not k.startswith(converted)}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert all(ours[k].data_ptr() == theirs[k].data_ptr() for k in theirs)  # no second copy
    assert not any(p.requires_grad for p in made.parameters()) and not made.training


@each
@torch.no_grad()
def test_kept_layers_say_what_the_teachers_say(architecture: str) -> None:
    made, source = student(architecture, "odd"), teacher(architecture)
    x = torch.randn(1, LONG, source.config.hidden_size, generator=torch.Generator().manual_seed(0))
    places = torch.arange(LONG)[None]
    rotary = [model.model.rotary_emb(x, places) for model in (made, source)]
    assert all(torch.equal(a, b) for a, b in zip(*rotary, strict=True))
    layers = zip(made.model.layers, source.model.layers, strict=True)
    for i, (ours, theirs) in enumerate(layers):
        a, b = (f(x, position_embeddings=rotary[0], position_ids=places) for f in (ours, theirs))
        assert torch.equal(a, b) == (i not in layers_of(architecture, "odd"))


@each
def test_converted_layers_have_no_attention(architecture: str) -> None:
    made = student(architecture, "even")
    assert sorted(made.mixers) == layers_of(architecture, "even")
    for i, layer in enumerate(made.model.layers):
        assert isinstance(layer.self_attn, GatedDeltaNet) == (i in made.mixers)
    sizes = {
        (name, p.shape)
        for name, p in make_mixer(made.config, 0, made.mixers[0].form).named_parameters()
    }
    assert sizes == {(name, p.shape) for name, p in made.mixers[0].named_parameters()}


def test_config_says_what_was_converted() -> None:
    made = student("qwen2", "odd")
    assert made.config.model_type == "gdn_hybrid_qwen2"
    assert made.config.architectures == ["GDNHybridQwen2ForCausalLM"]
    assert made.config.gdn["layers"] == [1, 3]
    assert made.config.gdn["form"]["qkv_bias"] and not made.config.gdn["form"]["qk_norm"]
    assert made.config.gdn["provenance"] == {"made_by": "test"}
    assert teacher("qwen2").config.model_type == "qwen2"


def test_every_supported_type_has_its_classes() -> None:
    assert sorted(CLASSES) == ARCHITECTURES
    for model_type, (config, model) in CLASSES.items():
        assert config.model_type == f"gdn_hybrid_{model_type}"
        assert model.config_class is config


def test_llama_rotary_scaling_is_kept() -> None:
    made, source = student("llama"), teacher("llama")
    assert made.config.rope_parameters == source.config.rope_parameters
    assert made.config.rope_parameters["rope_type"] == "llama3"
    seen = made.model.rotary_emb.inv_freq
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    assert torch.equal(seen, source.model.rotary_emb.inv_freq)
    assert not torch.allclose(seen, plain)


def test_tied_embeddings_stay_tied() -> None:
    tied, untied = student("llama"), student("mistral")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
