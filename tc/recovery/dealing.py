"""FSDP without the whole models in every process: the first one has them, and deals them out."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tc.recovery.checkpoint import rank_and_world, share
from tc.recovery.model import Distillation


def hollow(model: nn.Module) -> Any:
    """A copy on the meta device, whose parameters and buffers have no memory."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fresh = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if is_parameter else fresh
    return copy.deepcopy(model, memo)


def is_hollow(model: nn.Module) -> bool:
    """Whether a model has no memory."""
    return next(model.parameters()).is_meta


def shard(both: Distillation, mesh: DeviceMesh) -> None:
    """Deals every layer of both models, and what is around them, to the devices of a mesh."""
    for mixer in both.mixers.values():
        fully_shard(mixer, mesh=mesh)
    for model in (both.teacher, both.student):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(both, mesh=mesh)


@torch.no_grad()
def fill(both: Distillation, whole: Distillation, device: torch.device) -> None:
    """Gives a sharded module on the meta device memory, and the first process' values.

    Args:
        both: of `hollow` models, after `shard`.
        whole: the same module unsharded; read in the first process alone, where its memory is
            given back.
        device: this process' own.
    """
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # Swapped and not replaced, so that tied parameters stay one.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        both.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    is_first = rank_and_world()[0] == 0
    values = _tensors(whole)
    for name, tensor in _tensors(both).items():
        if is_first:
            full = values[name].detach().to(device).contiguous()
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(full, 0)
        if isinstance(tensor, DTensor):
            begin, end = share(tensor)
            tensor.to_local().copy_(full[begin:end])
        else:
            tensor.copy_(full)
    for value in values.values():  # whoever still holds the models holds no memory by that
        value.data = value.data.new_empty(0)


def _tensors(both: Distillation) -> dict[str, torch.Tensor]:
    return {**dict(both.named_parameters()), **dict(both.named_buffers())}
