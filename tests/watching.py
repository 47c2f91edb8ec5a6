"""What a computation makes of tensors, and how much of that is alive at a time."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """Notes the largest tensor made, the matrix products, and the most bytes alive at a time.

    Args:
        inputs: what is there anyway, and does not count.

    Attributes:
        largest: elements of the largest tensor, views of inputs included.
        products: the dtype of each matrix product.
        shapes: of what was made.
        peak: bytes.
    """

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.largest = self.live = self.peak = 0
        self.products: list[torch.dtype] = []
        self.shapes: set[tuple[int, ...]] = set()
        self.known = {x.untyped_storage()._cdata for x in inputs.values()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.products.append(args[-1].dtype)
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
                self._count(x, x.untyped_storage())
        return made

    def _count(self, x: torch.Tensor, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.shapes.add(tuple(x.shape))
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size
