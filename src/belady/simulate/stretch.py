"""A stretch of memory as expandable segments of torch's allocator have it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

# What is left of a hole is one again, down to this size.
LEAST = 512
# Blocks of up to so many bytes have pages of their own (kSmallSize of torch's allocator).
SMALL = 1 << 20
# After so many iterations the next ones find what the last one did.
_ITERATIONS = 2

# A block is taken, or given back, which is of 0 bytes: number and bytes.
Event = tuple[int, int]


class Stretch:
    """Memory that grows at its end.

    Attributes
    ----------
    end
        Bytes mapped so far.
    """

    def __init__(self) -> None:
        self.end = 0
        self._holes: dict[int, int] = {}  # bytes by address
        self._before: dict[int, int] = {}  # address by end
        self._by_size: list[tuple[int, int]] = []
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        """Address of a block; the hole at the end, which can grow, comes last."""
        for index in range(bisect_left(self._by_size, (nbytes, -1)), len(self._by_size)):
            size, address = self._by_size[index]
            if address + size < self.end:
                del self._by_size[index], self._holes[address], self._before[address + size]
                break
        else:
            address = self._before.get(self.end, self.end)
            size = max(self._fill(address), nbytes)
            self.end = max(self.end, address + size)
        rest = size - nbytes
        if rest >= LEAST:
            self._open(address + nbytes, rest)
            size = nbytes
        self._taken[address] = size
        return address

    def free(self, address: int) -> None:
        """Give a block back; it becomes one with the holes beside it."""
        size = self._taken.pop(address)
        if address + size in self._holes:
            size += self._fill(address + size)
        if address in self._before:
            before = self._before[address]
            size += self._fill(before)
            address = before
        self._open(address, size)

    def _open(self, address: int, size: int) -> None:
        self._holes[address] = size
        self._before[address + size] = address
        insort(self._by_size, (size, address))

    def _fill(self, address: int) -> int:
        """Take a hole away, if there is one; gives its bytes."""
        size = self._holes.pop(address, 0)
        if size:
            del self._before[address + size]
            self._by_size.pop(bisect_left(self._by_size, (size, address)))
        return size


def end_of(events: Sequence[Event], least: int, holes: Sequence[int] = (), wall: int = 0) -> int:
    """Bytes that a stretch grows to in iterations.

    Parameters
    ----------
    events
        Of one iteration.
    least
        Blocks of up to so many bytes are not in it.
    holes
        Bytes of each hole that it begins with, behind which ``wall`` bytes stay taken.
    """
    stretch = divided(holes, wall)
    for _ in range(_ITERATIONS):
        where: dict[int, int] = {}
        for block, nbytes in events:
            if nbytes > least:
                where[block] = stretch.take(nbytes)
            elif not nbytes and block in where:
                stretch.free(where.pop(block))
        if not where:
            # All is as before the first block: holes behind walls, and the end, which can grow.
            break
    return stretch.end


def divided(holes: Sequence[int], wall: int) -> Stretch:
    """A stretch that begins with holes of so many bytes, behind each of which a wall is taken."""
    stretch, opened = Stretch(), list[int]()
    for nbytes in holes:
        opened.append(stretch.take(nbytes))
        stretch.take(wall)
    for address in opened:
        stretch.free(address)
    return stretch
