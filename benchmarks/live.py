"""Live bytes of storages, op by op: what a budget means on a CPU, where no allocator counts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ALIGNMENT = 64  # to which torch rounds what it takes on a CPU


class LiveBytes(TorchDispatchMode):
    """Counts the storages of given tensors and of all that ops return, as long as they live."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._live: dict[int, Any] = {}
        self.nbytes = self.peak_bytes = 0
        for tensor in tensors:
            self._see(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        name = storage._cdata
        if name in self._live or tensor.device.type != "cpu":
            return
        nbytes = -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        self._live[name] = weakref.ref(storage, lambda _: self._gone(name, nbytes))
        self.nbytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def _gone(self, name: int, nbytes: int) -> None:
        del self._live[name]
        self.nbytes -= nbytes
