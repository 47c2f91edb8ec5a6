"""Who draws weights anew, and when: never what was loaded, always what no file had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from student_helpers import logits, student, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

DYNAMICS = ("A_log", "dt_bias")
IDS = tokens(40)[0]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    student("llama", "odd").save_pretrained(tmp_path)
    return tmp_path


def test_what_was_loaded_is_not_drawn_anew(saved: Path) -> None:
    """By whatever `transformers` and its users call once weights are there."""
    model, expected = AutoModelForCausalLM.from_pretrained(saved), logits(student("llama"), IDS)
    model.init_weights()
    model.initialize_weights()
    model.apply(model._init_weights)
    model.post_init()
    assert torch.equal(logits(model, IDS), expected)
    model.resize_token_embeddings(300)
    assert torch.equal(logits(model, IDS)[..., :256], expected[..., :256])
    model.mixers[1].reset_dynamics()  # a control: anew on purpose
    assert not torch.equal(logits(model, IDS)[..., :256], expected[..., :256])


def test_a_student_in_memory_is_not_drawn_anew() -> None:
    model = student("llama", "odd")
    expected = logits(model, IDS)
    model.init_weights()
    assert torch.equal(logits(model, IDS), expected)


def test_what_no_file_had_has_the_dynamics_of_fla(saved: Path) -> None:
    file = saved / "model.safetensors"
    stem = "model.layers.1.self_attn."
    kept = {k: v for k, v in load_file(file).items() if k.removeprefix(stem) not in DYNAMICS}
    save_file(kept, file, {"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert info["missing_keys"] == {f"{stem}{name}" for name in DYNAMICS}
    assert plausible(model)
    assert torch.equal(model.mixers[1].q_proj.weight, student("llama").mixers[1].q_proj.weight)


def plausible(model: PreTrainedModel) -> bool:
    """Dynamics as FLA draws them: A from (0, 16), dt from 0.001 to 0.1, no two heads alike."""
    found = True
    for mixer in model.mixers.values():
        A_log, dt_bias = (
            p.full_tensor() if isinstance(p, DTensor) else p
            for p in (mixer.A_log.detach(), mixer.dt_bias.detach())
        )
        dt = F.softplus(dt_bias)
        found &= bool((A_log.exp() < 16).all() and (dt > 9e-4).all() and (dt < 0.11).all())
        found &= len(dt_bias.unique()) == len(A_log.unique()) == mixer.num_heads
    return found


def emptied(model: PreTrainedModel) -> PreTrainedModel:
    """As `to_empty` leaves memory at its worst: zeros in parameters and buffers."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            (x.to_local() if isinstance(x, DTensor) else x).zero_()
    return model


def on_meta() -> PreTrainedModel:
    source = student("llama", "odd")
    with torch.device("meta"):
        return type(source)(source.config)


def test_a_model_without_memory_gets_buffers_and_dynamics() -> None:
    model, source = emptied(on_meta()), student("llama", "odd")
    wanted = source.model.rotary_emb.inv_freq
    assert not torch.equal(model.model.rotary_emb.inv_freq, wanted) and not plausible(model)
    model.init_weights()
    assert torch.equal(model.model.rotary_emb.inv_freq, wanted)
    assert plausible(model)
    model.load_state_dict(source.state_dict())
    assert torch.equal(logits(model, IDS), logits(source, IDS))


def test_loaded_rotary_buffers_are_the_teachers(saved: Path) -> None:
    """`from_pretrained` builds without memory too."""
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(model.model.rotary_emb.inv_freq, student("llama").model.rotary_emb.inv_freq)


@pytest.mark.slow
def test_dealt_to_two_processes_no_dynamics_are_zero(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(in_two, (tmp_path,), nprocs=2)  # type: ignore[no-untyped-call]
    assert len(list(tmp_path.glob("good_*"))) == 2


def in_two(rank: int, folder: Path) -> None:
    """What each of two processes does."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    mesh, model = init_device_mesh("cpu", (2,)), on_meta()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    emptied(model)
    assert not plausible(model)  # a control
    model.init_weights()
    assert all(isinstance(p, DTensor) for p in model.mixers[1].parameters())
    assert plausible(model)
    (folder / f"good_{rank}").touch()
    dist.destroy_process_group()
