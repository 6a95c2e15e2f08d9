"""Copies between fixed places, for what is captured once and launched again and again."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

import torch

from belady.ir.timeline import Lane, Moved
from belady.ir.trace import Tier
from belady.memory.fences import Fence
from belady.memory.lanes import Lanes
from belady.memory.slab import HostArena


class Queue(Protocol):
    """What `belady.memory.parcels.Hub` is here: duties for later, and whether it is open."""

    dropped: deque[Callable[[], None]]

    def check_open(self) -> None:
        """Refuse to carry anything after it was closed."""
        ...


class FixedCarrier:
    """Sends values to host memory that is theirs alone, and brings them back from there.

    What `belady.memory.carrier.Carrier` decides while an iteration runs, such as which host memory
    is free by now, is decided before, and the host waits for nothing.

    Parameters
    ----------
    places
        Host memory of each value that is sent, by its label: one-dimensional, in bytes.

    Attributes
    ----------
    joined
        How often compute has waited for all copies.
    check_open
        Raises `TierError` where the places are gone.
    close
        Gives the places back. Idempotent.
    """

    check_open: Callable[[], None]
    close: Callable[[], object]

    def __init__(self, lanes: Lanes, places: Mapping[int, torch.Tensor]) -> None:
        self.device = lanes.device
        self.joined = 0
        self._lanes = lanes
        self._places = places
        self._last: dict[Lane, Fence] = {}
        self._moved: dict[Lane, list[int]] = {}
        self.check_open = self.close = _nothing

    @property
    def host_bytes(self) -> int:
        """What the places take."""
        return sum(place.numel() for place in self._places.values())

    @property
    def moved(self) -> tuple[Moved, ...]:
        """What was copied since it was made, by lane."""
        return tuple(Moved(lane, sum(it), len(it)) for lane, it in self._moved.items())

    @classmethod
    def of(
        cls, lanes: Lanes, arena: HostArena, sizes: Mapping[int, int], queue: Queue
    ) -> FixedCarrier:
        """Take the places.

        Parameters
        ----------
        sizes
            Bytes of each value.
        queue
            Of whoever has the arena.

        Raises
        ------
        TierFullError
            If there is no room for all of them.
        """
        made = cls(lanes, places := {})
        made.check_open = queue.check_open
        give_back: list[Callable[[], None]] = []
        made.close = weakref.finalize(made, queue.dropped.extend, give_back)
        made.close.atexit = False
        for label, nbytes in sizes.items():
            block = arena.alloc(nbytes)
            give_back.append(partial(arena.free, block))
            for fence in block.fences:
                fence.synchronize()
            places[label] = block.tensor
        return made

    def send(self, source: torch.Tensor, tier: Tier, label: int = -1) -> FixedParcel:
        """Copy ``source`` out, after what the current stream does so far."""
        # Traced without bytes, a storage can be a little larger than it is.
        place = self._places[label][: source.numel()]
        return FixedParcel(self, place, self.copy(Lane.COPY_OUT, place, source, ()))

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Iterable[Fence]
    ) -> Fence:
        """Issue a copy that starts after ``after`` and what the current stream does so far."""
        fence = self._lanes.copy(lane, target, source, (self._lanes.present(), *after))
        self._last[lane] = fence
        self._moved.setdefault(lane, []).append(target.numel())
        return fence

    def wait(self, fence: Fence) -> None:
        """Make the current stream wait."""
        self._lanes.wait(fence, self._lanes.present())

    def join(self) -> None:
        """Make the current stream wait for all copies: a capture ends with all that it began.

        Fences of one capture mean nothing in the next one, so none of them is waited for again.
        """
        for fence in self._last.values():
            self.wait(fence)
        self._last.clear()
        self.joined += 1


def _nothing() -> None:
    """Places of others stay."""


class FixedParcel:
    """Bytes that were sent: `belady.memory.parcels.Parcel`."""

    def __init__(self, carrier: FixedCarrier, place: torch.Tensor, sent: Fence) -> None:
        self._carrier, self._place = carrier, place
        self._sent, self._before = sent, carrier.joined

    def _under_way(self) -> tuple[Fence, ...]:
        return (self._sent,) if self._carrier.joined == self._before else ()

    def wait_sent(self) -> None:
        """Make the current stream wait for the copy-out."""
        for fence in self._under_way():
            self._carrier.wait(fence)

    def fetch(self) -> FixedArrival:
        """Take device bytes on the current stream and issue the copy-in."""
        carrier, nbytes = self._carrier, self._place.numel()
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=carrier.device)
        landed = carrier.copy(Lane.COPY_IN, tensor, self._place, self._under_way())
        return FixedArrival(carrier, tensor, landed)


class FixedArrival:
    """Bytes on their way back: `belady.memory.parcels.Arrival`."""

    def __init__(self, carrier: FixedCarrier, tensor: torch.Tensor, landed: Fence) -> None:
        self.tensor = tensor
        self._carrier, self._landed, self._before = carrier, landed, carrier.joined

    def wait(self) -> None:
        """Make the current stream wait for the copy-in."""
        if self._carrier.joined == self._before:
            self._carrier.wait(self._landed)
