"""Checkpoints by themselves: shards, which one is taken, and what a failed write leaves."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tc.recovery.checkpoint as checkpoint
from tc.artifacts import Manifest, find, save_tensors
from tc.config import OptimizerKind
from tc.errors import TCError
from tc.optim import MuonAdamW, parameter_groups
from tc.recovery.checkpoint import (
    discard,
    latest,
    restore_optimizer,
    state_tensors,
    stored,
    write,
)

SIZES = {"q_proj.weight": (5, 3), "head.weight": (1, 4), "norm.weight": (3,), "a": (2, 2)}
"""Rows that two processes cannot share evenly; `q_proj` is Muon's."""


def manifest(made: str = "for a test") -> Manifest:
    return Manifest("checkpoint of stage2", {"made": made})


def values(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=random) for name, size in SIZES.items()}


def optimizer(parameters: dict[str, torch.nn.Parameter], kind: OptimizerKind) -> MuonAdamW:
    return MuonAdamW(parameter_groups(parameters.items(), kind, 0.1, lambda name: 0.01))


def trained(
    kind: OptimizerKind, mesh: object = None
) -> tuple[dict[str, torch.nn.Parameter], MuonAdamW]:
    """Parameters after two steps, in shards where there is a mesh."""

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])  # type: ignore

    parameters = {n: torch.nn.Parameter(placed(value)) for n, value in values(0).items()}
    made = optimizer(parameters, kind)
    for seed in (1, 2):
        for name, gradient in values(seed).items():
            parameters[name].grad = placed(gradient)
        made.step()
    return parameters, made


def contents(folder: Path) -> dict[str, torch.Tensor]:
    found = find(folder, manifest())
    assert found is not None
    with stored(folder, found) as tensors:
        return {f"{kind}/{name}": value.whole() for (kind, name), value in tensors.items()}


@pytest.mark.parametrize("kind", OptimizerKind)
def test_weights_and_state_come_back_bit_for_bit(kind: OptimizerKind, tmp_path: Path) -> None:
    parameters, made = trained(kind)
    write(tmp_path / "step_1", manifest(), state_tensors(parameters, made))
    fresh = {name: torch.nn.Parameter(torch.zeros(SIZES[name])) for name in SIZES}
    again = optimizer(fresh, kind)
    restore_optimizer(tmp_path / "step_1", manifest_of(tmp_path / "step_1"), fresh, again)
    for name, parameter in parameters.items():
        assert made.state[parameter].keys() == again.state[fresh[name]].keys()
        for key, value in made.state[parameter].items():
            assert torch.equal(value, again.state[fresh[name]][key])
    kinds = {name.partition("/")[0] for name in contents(tmp_path / "step_1")}
    momentum = {"momentum_buffer"} if kind is OptimizerKind.muon else set()
    assert kinds == {"weight", "exp_avg", "exp_avg_sq", "step"} | momentum


def manifest_of(folder: Path) -> Manifest:
    found = find(folder, manifest())
    assert found is not None
    return found


@pytest.mark.parametrize("cut", [(5,), (3, 2), (2, 2, 1), (5, 0)])
def test_rows_are_read_alone_however_the_files_were_cut(
    cut: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randn(5, 3)
    made = manifest()
    made.info["world"] = len(cut)
    tmp_path.joinpath("step_1").mkdir()
    for rank, piece in enumerate(whole.split(cut)):
        tensors = {"exp_avg/a": piece, "step/a": torch.tensor(4.0)}
        save_tensors(tmp_path / "step_1" / f"rank_{rank:03d}.safetensors", tensors)
    with stored(tmp_path / "step_1", made) as found:
        value = found["exp_avg", "a"]
        assert torch.equal(value.whole(), whole)
        for begin in range(6):
            for end in range(begin, 6):
                assert torch.equal(value.rows(begin, end), whole[begin:end])
        assert not torch.equal(value.rows(1, 3), whole[0:2])
        assert found["step", "a"].whole() == 4 and not found["step", "a"].has_rows


def three(folder: Path) -> list[Path]:
    """Three good checkpoints."""
    folders = []
    for step in (2, 4, 10):
        folders.append(folder / f"step_{step:07d}")
        made = manifest()
        made.info["step"] = step
        write(folders[-1], made, {"weight/a": torch.ones(100)})
    return folders


def truncate(path: Path) -> None:
    file = path / "rank_000.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def turn_a_byte(path: Path) -> None:
    data = bytearray((path / "rank_000.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "rank_000.safetensors").write_bytes(data)


def make_foreign(path: Path) -> None:
    record = json.loads((path / "manifest.json").read_text())
    record["made_by"]["made"] = "elsewhere"
    (path / "manifest.json").write_text(json.dumps(record))


def forget_the_step(path: Path) -> None:
    record = json.loads((path / "manifest.json").read_text())
    del record["info"]["step"]
    (path / "manifest.json").write_text(json.dumps(record))


DAMAGES = {
    "no step": forget_the_step,
    "truncated": truncate,
    "a byte": turn_a_byte,
    "foreign": make_foreign,
    "no shard": lambda path: (path / "rank_000.safetensors").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: (path / "manifest.json").write_text('{"kind": "check'),
    "no file at all": lambda path: [file.unlink() for file in path.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_checkpoint_is_named_and_the_one_before_it_taken(damage: str, tmp_path: Path) -> None:
    folders, said = three(tmp_path), []
    taken = latest(tmp_path, manifest(), said.append)
    assert taken is not None and taken[0] == folders[2] and not said
    DAMAGES[damage](folders[2])
    taken = latest(tmp_path, manifest(), said.append)
    assert taken is not None and taken[0] == folders[1]
    assert len(said) == 1 and str(folders[2]) in said[0] and "before it" in said[0]
    for path in folders[:2]:
        make_foreign(path)
    assert latest(tmp_path, manifest(), said.append) is None


def test_the_newest_stay_and_none_that_was_passed_over_takes_their_place(tmp_path: Path) -> None:
    folders = three(tmp_path)
    for keep in (3, 4, 5, 9):
        discard(tmp_path, folders[2], keep)
        assert sorted(tmp_path.iterdir()) == folders
    discard(tmp_path, folders[1], keep=1)
    assert sorted(tmp_path.iterdir()) == folders[1:]
    discard(tmp_path, folders[2], keep=1)
    assert sorted(tmp_path.iterdir()) == folders[2:]
    discard(tmp_path, None, keep=0)
    assert not list(tmp_path.iterdir())


def test_shards_fit_any_number_of_processes_and_a_failed_one_spoils_nothing(
    tmp_path: Path,
) -> None:
    for kind in OptimizerKind:
        write(tmp_path / f"{kind.name}_whole", manifest(), state_tensors(*trained(kind)))
    torch.multiprocessing.spawn(in_two, (tmp_path,), nprocs=2)  # type: ignore
    for kind in OptimizerKind:
        whole, shards = (contents(tmp_path / f"{kind.name}_{how}") for how in ("whole", "shards"))
        assert whole.keys() == shards.keys()
        for name, value in whole.items():
            muons = kind is OptimizerKind.muon and "q_proj" in name  # orthogonalised in bfloat16
            close = 5e-4 if muons else 1e-6
            torch.testing.assert_close(shards[name], value, rtol=close, atol=close)
        assert len(list((tmp_path / f"{kind.name}_shards").glob("rank_*"))) == 2
    assert not list(tmp_path.glob("bad*")) and not list(tmp_path.glob(".*"))


def in_two(rank: int, folder: Path) -> None:
    """What each of two processes does."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for kind in OptimizerKind:
        parameters, made = trained(kind, mesh)
        write(folder / f"{kind.name}_shards", manifest(), state_tensors(parameters, made))
        deals(folder / f"{kind.name}_whole", parameters, made, kind)
    for name in ("bad", "adamw_shards"):
        for failing in (0, 1):
            fails(folder / name, failing, state_tensors(parameters, made))
    assert contents(folder / "adamw_shards")
    dist.destroy_process_group()


def deals(folder: Path, parameters: dict, made: MuonAdamW, kind: OptimizerKind) -> None:
    """A whole checkpoint is dealt as the shards lie."""
    again = optimizer(parameters, kind)
    restore_optimizer(folder, manifest_of(folder), parameters, again)
    for parameter in parameters.values():
        for key, value in made.state[parameter].items():
            found = again.state[parameter][key]
            assert isinstance(found, DTensor) == isinstance(value, DTensor), key
            mine, expected = checkpoint.local(found), checkpoint.local(value)
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def fails(folder: Path, failing: int, tensors: dict[str, torch.Tensor]) -> None:
    """The disk of one process is full; both say so, and nothing of it stays."""

    def full(path: Path, tensors: object) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    real = checkpoint.save_tensors
    if dist.get_rank() == failing:
        checkpoint.save_tensors = full
    own = "no space left" if dist.get_rank() == failing else "another process could not write"
    with pytest.raises(TCError, match=own) as error:
        write(folder, manifest(), tensors)
    assert str(folder) in str(error.value)
    checkpoint.save_tensors = real
