"""Checkpoints: trained weights and optimizer state, whole or in shards, and nothing of the teacher.

A checkpoint is an artifact with one safetensors file a process: `rank_000.safetensors` alone where
every process holds the same weights, one for each where each holds a shard. A tensor's name is its
kind (`weight`, `exp_avg`, ...) and the parameter's name in the student. Shards are pieces of the
first dimension in the order of the ranks, so a reader puts them together, or deals them to another
number of processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tc.artifacts import Manifest, disk_errors, find, open_tensors, save_tensors, writing
from tc.errors import TCError

Parameters = Mapping[str, torch.nn.Parameter]
"""Trained parameters by their names in the student."""


def rank_and_world() -> tuple[int, int]:
    """This process' number and how many there are; 0 and 1 outside of a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_tensors(
    parameters: Parameters, optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """Weights and, where an optimizer is given, its state, by name."""
    tensors: dict[str, torch.Tensor] = {f"weight/{name}": p for name, p in parameters.items()}
    if optimizer is not None:
        for name, parameter in parameters.items():
            for kind, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{kind}/{name}"] = value
    return tensors


def write(folder: Path, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a checkpoint whole or not at all; every process calls it with what it holds.

    Args:
        folder: its place, on a file system that all processes share.
        manifest: what it is; `info["world"]`, the number of files, is set here.
        tensors: of `state_tensors`, the same names on every process.

    Raises:
        TCError: on every process, if one of them cannot write.
    """
    problem: Exception | None = None
    try:
        _write(folder, manifest, tensors)
    except Exception as error:  # whatever it is, the other processes must not wait for this one
        problem = error
    failed = agree(problem is not None)
    if problem is not None:
        raise problem
    if failed:
        raise _of_another(folder)


def _write(folder: Path, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    rank, world = rank_and_world()
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    manifest.info["world"] = world if sharded else 1
    with ExitStack() as stack:
        place = ""
        problem: Exception | None = None
        if rank == 0:
            try:
                place = str(stack.enter_context(writing(folder, manifest)))
            except (OSError, TCError) as error:
                problem = error
        place = broadcast(place)
        if place and (sharded or rank == 0):
            try:
                mine = {name: local(tensor) for name, tensor in tensors.items()}
                with disk_errors(folder):
                    save_tensors(Path(place) / f"rank_{rank:03d}.safetensors", mine)
            except Exception as error:
                problem = error
        if problem is not None:
            agree(True)
            raise problem
        if agree(not place):
            raise _of_another(folder)


def _of_another(folder: Path) -> TCError:
    return TCError(f"another process could not write {folder}; its message says why.")


def agree(flag: bool) -> bool:
    """Whether any process says so."""
    if rank_and_world()[1] == 1:
        return flag
    value = torch.tensor(int(flag), device=_device())
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value)


def any_of(flags: torch.Tensor) -> torch.Tensor:
    """Which flags are set on any process."""
    if rank_and_world()[1] > 1:
        counts = flags.int()
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        return counts.bool()
    return flags


def mean(values: torch.Tensor) -> torch.Tensor:
    """The mean over processes."""
    world = rank_and_world()[1]
    if world > 1:
        dist.all_reduce(values)
    return values / world


def broadcast(text: str) -> str:
    """The text of process 0."""
    if rank_and_world()[1] == 1:
        return text
    box = [text]
    dist.broadcast_object_list(box, 0)
    return box[0]


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


class Stored:
    """A tensor of a checkpoint, of which no more is read than is asked for.

    Args:
        key: its name in the files.
        files: open safetensors files, one a process that wrote.
    """

    def __init__(self, key: str, files: list[Any]) -> None:
        self._pieces = [file.get_slice(key) for file in files]
        self._shape = self._pieces[0].get_shape()
        if not self._shape or len(files) == 1:  # a count of steps is the same in all files
            self._pieces = self._pieces[:1]

    @property
    def has_rows(self) -> bool:
        """Whether it has a dimension at all."""
        return bool(self._shape)

    def whole(self) -> torch.Tensor:
        """All of it."""
        pieces: list[torch.Tensor] = [piece[...] for piece in self._pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """A part of the first dimension."""
        found, at = [], 0
        for piece in self._pieces:
            size = piece.get_shape()[0]
            low, high = max(begin - at, 0), min(end - at, size)
            if low < high:
                found.append(piece[low:high])
            at += size
        return torch.cat(found) if found else torch.empty(0, *self._shape[1:])


@contextmanager
def stored(folder: Path, manifest: Manifest) -> Iterator[dict[tuple[str, str], Stored]]:
    """The tensors of a checkpoint by kind and name of the parameter, while its files are open."""
    with ExitStack() as stack:
        files = [
            stack.enter_context(open_tensors(folder / f"rank_{rank:03d}.safetensors"))
            for rank in range(manifest.info["world"])
        ]
        found = {}
        for key in files[0].keys():  # noqa: SIM118
            kind, _, name = key.partition("/")
            found[kind, name] = Stored(key, files)
        yield found


def read_weights(folder: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The trained weights of a checkpoint by their names in the student."""
    with stored(folder, manifest) as found:
        return {name: x.whole() for (kind, name), x in found.items() if kind == "weight"}


@torch.no_grad()
def restore_optimizer(
    folder: Path, manifest: Manifest, parameters: Parameters, optimizer: torch.optim.Optimizer
) -> None:
    """Gives an optimizer the state that a checkpoint holds, or this process' share of it."""
    with stored(folder, manifest) as found:
        for (kind, name), value in found.items():
            if kind != "weight":
                parameter = parameters[name]
                optimizer.state[parameter][kind] = _like(parameter, value)


def _like(parameter: torch.Tensor, value: Stored) -> torch.Tensor:
    """A state tensor as a parameter's state is held: where it is, and in its shards."""
    if not value.has_rows:
        return value.whole()  # a count of steps, which torch keeps on the CPU
    if not isinstance(parameter, DTensor):
        return value.whole().to(parameter.device)
    fresh: Any = torch.zeros_like(parameter)
    begin, end = share(parameter)
    if begin < end:
        fresh.to_local().copy_(value.rows(begin, end))
    return fresh


def share(parameter: torch.Tensor) -> tuple[int, int]:
    """Which rows of a parameter's first dimension this process holds."""
    rank, world = rank_and_world()
    rows = parameter.shape[0]
    size = -(-rows // world)
    return min(rank * size, rows), min((rank + 1) * size, rows)


Found = tuple[Path, Manifest]
"""A checkpoint's folder and its manifest."""


def latest(folder: Path, wanted: Manifest, say: Callable[[str], None]) -> Found | None:
    """The newest good checkpoint of a training run, or None.

    Args:
        folder: that holds `step_*` folders.
        wanted: kind and making that a checkpoint must have.
        say: told of each one that is damaged or of another making, and passed over.
    """
    for path in sorted(folder.glob("step_*"), reverse=True):
        try:
            found = find(path, wanted)
        except TCError as error:
            say(f"{error} Taking the checkpoint before it.")
            continue
        if found is None:
            say(f"{path} is no checkpoint: it has no manifest. Taking the one before it.")
            continue
        if not isinstance(found.info.get("step"), int):
            say(f"{path} is damaged: its manifest has no step. Taking the checkpoint before it.")
            continue
        return path, found
    return None


def discard(folder: Path, newest: Path | None, keep: int) -> None:
    """Removes all but the newest checkpoints; only the first process does.

    Args:
        folder: that holds `step_*` folders.
        newest: what was written last, or None. Those of later steps were damaged or of another
            making, and passed over: they must not stay in the stead of good ones.
        keep: how many of them stay.
    """
    if rank_and_world()[0] > 0:
        return
    checkpoints = sorted(folder.glob("step_*"))
    if newest is not None:
        checkpoints = [path for path in checkpoints if path <= newest]
    for path in checkpoints[: max(0, len(checkpoints) - keep)]:
        shutil.rmtree(path, ignore_errors=True)


def trained(student: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of a student that are trained, by name."""
    return {name: p for name, p in student.named_parameters() if p.requires_grad}
