"""One decision for everything that is saved: carried out at once, brought back when asked for.

This is the floor: least memory, no overlap. It needs no plan, so it also runs the first
iterations, and it is what `belady.save_on` does.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import torch

from belady.eager.content import Kept, Saved
from belady.errors import SpillError, TierFullError
from belady.ir.trace import Tier
from belady.memory.carrier import Carrier
from belady.memory.contents import Moved, Packed
from belady.memory.geometry import Geometry, movable

_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
# Makes the content of a tensor, to be managed from byte ``start`` to ``stop``; None keeps it.
Maker = Callable[[torch.Tensor, int, int], "Moved | Packed | None"]


class Immediate:
    """Pack hook that manages every saved tensor in the same way.

    Parameters
    ----------
    make
        Makes the content of a tensor.
    tiers
        Where moved content goes: the first of them that has room; at DEVICE it stays.
    persistent
        Addresses of the storages of parameters and buffers, which are never managed.
    min_bytes
        Tensors whose storage is smaller stay.

    Attributes
    ----------
    kept
        Saves that could not be managed, by reason.
    """

    def __init__(
        self,
        make: Maker,
        tiers: tuple[Tier, ...],
        persistent: Container[int] = (),
        min_bytes: int = 0,
    ) -> None:
        self._make = make
        self._tiers = tiers
        self._persistent = persistent
        self._min_bytes = min_bytes
        self._live: dict[Any, weakref.ref[Moved | Packed]] = {}
        self._pending: list[Moved] = []
        self._sequence = -1
        self.kept: Counter[str] = Counter()

    def pack(self, tensor: torch.Tensor) -> Saved | Kept:
        """Save ``tensor``: the pack hook."""
        sequence = _sequence_number()
        if sequence != self._sequence:
            self._sequence = sequence
            self.settle()
        if reason := self._stays(tensor):
            self.kept[reason] += 1
            return Kept(tensor)
        content = self._content(tensor)
        if content is None:
            self.kept["nothing gained"] += 1
            return Kept(tensor)
        content.unread += 1
        return Saved(tensor, content)

    def end_pass(self) -> None:
        """Issue what is due, and share no bytes with the passes that follow.

        Between two passes, memory that torch does not watch (numpy's, ``.data``) may be written
        without a new version.
        """
        self.settle()
        self._live.clear()

    def drop(self) -> None:
        """Forget what is due: the pass came to nothing, its bytes stay until its graph dies."""
        self._pending.clear()
        self._live.clear()

    def settle(self) -> None:
        """Carry out the moves that the op before asked for.

        What an op needs is saved before it runs, and some ops (rrelu) write what they have saved.
        So copies are issued when the next op saves something: every op that saves has an autograd
        node, and each node takes a number of its own.
        """
        while self._pending:
            content = self._pending.pop(0)
            self._send(content)
            content.free()

    def _send(self, content: Moved) -> None:
        for tier in self._tiers:
            if tier is Tier.DEVICE:
                return
            try:
                return content.send(tier)
            except (TierFullError, SpillError):
                if tier is self._tiers[-1]:
                    raise
                self.kept[f"no room in tier {tier.value}"] += 1

    def _stays(self, tensor: torch.Tensor) -> str:
        if not movable(tensor, tensor.device):
            return f"{type(tensor).__name__} on {tensor.device.type} cannot be moved"
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return "parameter"
        storage = tensor.untyped_storage()
        if storage._cdata in self._persistent:
            return "parameter"
        if storage.nbytes() < self._min_bytes:
            return "small"
        return ""

    def _content(self, tensor: torch.Tensor) -> Moved | Packed | None:
        storage = tensor.untyped_storage()
        start, stop = _extent(tensor, storage.nbytes())
        # A version says nothing of tensors that count theirs by themselves, as the parts that
        # `torch.unsafe_chunk` gives, which cells of LSTMs then write one by one.
        counts = tensor if tensor._base is None else tensor._base
        version = (tensor._version, counts.storage_offset(), counts.shape, counts.stride())
        key = (storage._cdata, version, start, stop, tensor.dtype)
        # A leaf's memory may be the user's, who can refill it between two saves without torch
        # seeing it: each of its saves gets bytes of its own.
        known = None if tensor.is_leaf else self._live.get(key)
        content = known() if known is not None else None
        # While a content lives, its weak reference to the storage keeps the address from being
        # used again, so an equal address names the same storage.
        if content is None or content.identity.expired():  # type: ignore[no-untyped-call]
            content = self._make(tensor, start, stop)
            if content is None:
                return None
            live = self._live
            live[key] = weakref.ref(content, lambda ref: _forget(live, key, ref))
            if isinstance(content, Moved):
                self._pending.append(content)
        return content


def _forget(live: dict[Any, Any], key: Any, ref: Any) -> None:
    if live.get(key) is ref:
        del live[key]


def _extent(tensor: torch.Tensor, nbytes: int) -> tuple[int, int]:
    """Bytes of the storage to manage: all of it, unless the tensor reaches less than half."""
    start, stop = Geometry.of(tensor).span()
    return (start, stop) if 0 < 2 * (stop - start) < nbytes else (0, nbytes)


def moving(carrier_for: Callable[[torch.device], Carrier]) -> Maker:
    """Maker of content that leaves its device by the carrier of that device."""

    def make(tensor: torch.Tensor, start: int, stop: int) -> Moved:
        return Moved(tensor, start, stop, carrier_for(tensor.device))

    return make


def leaving(carrier: Carrier) -> Maker:
    """Maker of content that leaves the device of ``carrier``; what is elsewhere stays there."""

    def make(tensor: torch.Tensor, start: int, stop: int) -> Moved | None:
        return Moved(tensor, start, stop, carrier) if tensor.device == carrier.device else None

    return make


def encoding(tensor: torch.Tensor, _start: int, _stop: int) -> Packed | None:
    """Maker of content that stays on its device in a lossless encoding."""
    return Packed.of(tensor)
