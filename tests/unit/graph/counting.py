"""Bytes that live storages really hold while generated code runs, counted after every op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import belady.graph.capture as capture
from belady.memory.fences import Fence
from belady.memory.geometry import below_autograd
from belady.memory.parcels import Hub


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def track(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.track(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        self.peak = max(self.peak, self.live_bytes())
        return result

    def live_bytes(self) -> int:
        """Bytes of the storages that are still there."""
        live = {k: it for k, it in self._storages.items() if not it[0].expired()}
        self._storages = live
        return sum(nbytes for _, nbytes in live.values())


@contextmanager
def counting(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count inside generated code only: Dynamo does not compile under a dispatch mode."""

    @contextmanager
    def counted() -> Iterator[None]:
        with counter, below_autograd():
            yield

    landing = Hub.landing

    def tracked(self: Hub, nbytes: int) -> tuple[Tensor, Fence]:
        target, fence = landing(self, nbytes)
        counter.track(target)
        return target, fence

    with monkeypatch.context() as patch:
        patch.setattr(capture, "below_autograd", counted)
        patch.setattr(Hub, "landing", tracked)
        yield
