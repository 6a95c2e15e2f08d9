"""What torch's allocator hands out and takes back, in order.

Where blocks come to lie follows from that order alone, and of kernels that a compiler has made of
many ops nobody knows it before they have run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from belady.simulate.stretch import Event

# What torch remembers at most of an iteration; of a longer one its end.
_ENTRIES = 1 << 20
_Entry = Mapping[str, Any]
_TAKEN, _GIVEN_BACK = "alloc", "free_completed"


class Ledger:
    """Notes the blocks of one CUDA device; nothing on another one, or where somebody else does.

    Torch has one such record in a process (`torch.cuda.memory._record_memory_history`).

    Parameters
    ----------
    device
        A CUDA device has its index.

    Attributes
    ----------
    addresses
        Of the blocks that were noted last, by number.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open = False
        self.addresses: Sequence[int] = ()

    @property
    def listens(self) -> bool:
        """Whether what is taken and given back is noted."""
        return self._open

    def begin(self) -> None:
        """Note what is taken and given back from here on."""
        self.drop()
        if self._device.type == "cuda" and not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=_ENTRIES)
            self._open = True

    def end(self) -> list[Event]:
        """What was noted, without blocks in pools of their own; at last none is left."""
        if not self._open:
            return []
        found = torch.cuda.memory._snapshot()
        self.drop()
        pools = [it for it in found["segments"] if tuple(it["segment_pool_id"]) != (0, 0)]
        events, self.addresses = _numbered(found["device_traces"][self._device.index], pools)
        return events

    def drop(self) -> None:
        """Forget what was noted."""
        if self._open:
            torch.cuda.memory._record_memory_history(None)
            self._open = False


def _numbered(entries: Iterable[_Entry], pools: Iterable[_Entry]) -> tuple[list[Event], list[int]]:
    """Entries as events, without those of blocks that lie in ``pools``, and where blocks lay."""
    apart = [(it["address"], it["address"] + it["total_size"]) for it in pools]
    events, living, addresses = list[Event](), dict[int, int](), list[int]()
    for entry in entries:
        at = entry.get("addr", 0)
        if entry["action"] == _TAKEN and not any(begin <= at < end for begin, end in apart):
            living[at] = len(addresses)
            addresses.append(at)
            events.append((living[at], entry["size"]))
        elif entry["action"] == _GIVEN_BACK and at in living:
            events.append((living.pop(at), 0))
    return [*events, *((block, 0) for block in living.values())], addresses
