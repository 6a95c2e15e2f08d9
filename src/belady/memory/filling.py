"""Blocks of torch's allocator where a packing has them.

Nobody can tell torch's allocator where to put a block: it takes the smallest hole. But where it
puts one follows from the holes that there are, and what else is free can be filled for a moment.
So before anything may take blocks all holes are filled but for those in which its blocks are to
lie, and emptied again afterwards. While an iteration is captured that costs a little time, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from belady.memory.cap import WALL_BYTES
from belady.memory.geometry import unseen
from belady.simulate.packing import Packing
from belady.simulate.stretch import SMALL


class Hole(NamedTuple):
    """What is free between two blocks; ``last`` can grow, and is used after all others."""

    last: bool
    nbytes: int
    address: int


class _Place(NamedTuple):
    """Where a block is to lie."""

    address: int
    nbytes: int
    number: int


class Memory(Protocol):
    """What blocks are taken from: the smallest hole that holds one, the lowest of equals."""

    def counts(self) -> tuple[int, int]:
        """How many blocks of more than `SMALL` bytes were taken, and given back, so far."""
        ...

    def holes(self) -> list[Hole]:
        """What is free, in pieces of more than `SMALL` bytes."""
        ...

    def take(self, nbytes: int) -> tuple[int, object]:
        """The address of a block, and what holds it."""
        ...


class Filling:
    """Has the blocks that come lie where they are to.

    Parameters
    ----------
    packing
        Its addresses count from the beginning of the largest hole that there is at first.

    Attributes
    ----------
    missed
        Numbers of those that did not find their place free.
    """

    def __init__(self, memory: Memory, packing: Packing) -> None:
        self._memory = memory
        self._lives, self._addresses = packing.lives, packing.addresses
        self._begin: int | None = None
        self._open = False
        self._next = 0
        # Of all blocks taken so far those that were ours are not the ones that come.
        self._seen, _ = memory.counts()
        self._ours = 0
        self._fillers: list[object] = []
        # What the counts were when all was filled.
        self._stands: tuple[int, int] | None = None
        self._missing: Sequence[int] = ()
        self.missed: list[int] = []

    def open(self) -> None:
        """Fill from here on, until it is closed."""
        self._open = True
        self.point()

    def point(self) -> None:
        """Something may take blocks."""
        if not self._open:
            return
        with unseen():
            counts = self._memory.counts()
            if self._stands == counts:
                return
            come = counts[0] - self._seen - self._ours
            self._seen += come
            self._next += come
            self.missed += [it for it in self._missing if it < self._next]
            self._fillers.clear()
            self._missing = self._fill()
            self._stands = self._memory.counts()

    def before(self, *values: object) -> None:
        """As a `belady.graph.code.Keeper`."""
        self.point()

    def made(self, *values: object) -> None:
        """What was made lies where it lies."""

    held = made

    def close(self) -> None:
        """Fill nothing any more, until it is opened again."""
        self._open = False
        self._fillers.clear()
        self._stands = None

    def _fill(self) -> Sequence[int]:
        """Leave free what the blocks of the next moment are to lie in; those whose place is not."""
        if self._next >= len(self._lives):
            return ()
        holes = sorted(self._memory.holes())
        if self._begin is None:
            # Where nothing could be set aside there is none.
            self._begin = max(holes, key=lambda it: it.nbytes).address if holes else 0
        wanted = self._wanted(self._begin)
        left, missing = list[object](), {it.number for it in wanted}
        for hole in holes:
            inside = [it for it in wanted if _holds(hole, it)]
            if not self._divide(hole, inside, left):
                # Nothing lies where it was seen to: some other thread has taken a block.
                self._fillers.clear()
                return [it.number for it in wanted]
            missing.difference_update(it.number for it in inside)
        return sorted(missing)

    def _wanted(self, begin: int) -> list[_Place]:
        """Where the blocks of the next moment are to lie, the lowest first."""
        moment, places = self._lives[self._next].first, []
        for number in range(self._next, len(self._lives)):
            if self._lives[number].first != moment:
                break
            nbytes = self._lives[number].nbytes
            places.append(_Place(begin + self._addresses[number], nbytes, number))
        return sorted(places)

    def _divide(self, hole: Hole, inside: Sequence[_Place], left: list[object]) -> bool:
        """Fill a hole around what is to lie in it; whether blocks lay as they were to."""
        at, end = hole.address, hole.address + hole.nbytes
        pieces = list[tuple[int, int, list[object]]]()
        for address, nbytes in _united(inside):
            if address - at > SMALL:
                pieces.append((at, address - at, self._fillers))
                at = address
            pieces.append((at, nbytes, left))
            at += nbytes
        # The last hole would be used after all others: what is to lie in it is walled off.
        rest = end - at if not hole.last else min(end - at, WALL_BYTES) if inside else 0
        if rest > SMALL:
            pieces.append((at, rest, self._fillers))
        for at, nbytes, held in pieces:
            address, block = self._memory.take(nbytes)
            self._ours += 1
            held.append(block)
            if address != at:
                return False
        return True


def _united(places: Iterable[_Place]) -> list[tuple[int, int]]:
    """Places, the lowest first, as address and bytes; those on one another are one.

    Of such two the first is gone before the second comes.
    """
    found = list[tuple[int, int]]()
    for address, nbytes, _ in places:
        if found and address < sum(found[-1]):
            begin, before = found.pop()
            nbytes, address = max(before, address + nbytes - begin), begin
        found.append((address, nbytes))
    return found


def _holds(hole: Hole, place: _Place) -> bool:
    end = hole.address + hole.nbytes
    return hole.address <= place.address and place.address + place.nbytes <= end


class PoolMemory:
    """A pool of torch's allocator, all of whose room was set aside in one piece."""

    def __init__(self, device: torch.device, pool: tuple[int, int]) -> None:
        self._device, self._pool = device, pool

    def counts(self) -> tuple[int, int]:
        """How many large blocks were taken, and given back, on the device so far."""
        of = torch._C._cuda_memoryStats(self._device.index)["allocation"]["large_pool"]
        return int(of["allocated"]), int(of["freed"])

    def holes(self) -> list[Hole]:
        """What is free, in pieces of more than `SMALL` bytes."""
        segments = torch.cuda.memory_snapshot(self._pool)  # type: ignore[no-untyped-call]
        return [
            Hole(block is segment["blocks"][-1], block["size"], block["address"])
            for segment in segments
            if segment["segment_type"] == "large"
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] > SMALL
        ]

    def take(self, nbytes: int) -> tuple[int, object]:
        """The address of a block, and what holds it."""
        block = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return block.data_ptr(), block
