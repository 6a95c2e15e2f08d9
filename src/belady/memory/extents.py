"""Free ranges of an address space: best fit, coalescing, and the fences that they carry."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from belady.ir.timeline import Lane
from belady.memory.fences import Fence

PAGE = 4096


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """Smallest multiple of ``unit`` that is at least ``nbytes``."""
    return -(-nbytes // unit) * unit


def latest(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """Keep the last fence of each lane: passing it implies passing the others."""
    last: dict[Lane, Fence] = {}
    for fence in fences:
        known = last.get(fence.lane)
        if known is None or known.order < fence.order:
            last[fence.lane] = fence
    return tuple(last.values())


class Range(NamedTuple):
    """Bytes ``start`` to ``start + nbytes``, and what must pass before they are written."""

    start: int
    nbytes: int
    fences: tuple[Fence, ...] = ()

    @property
    def end(self) -> int:
        """First byte after the range."""
        return self.start + self.nbytes


class Extents:
    """Free ranges of one address space, in whole pages.

    A range given back carries the fences of copies that may still touch it; whoever takes
    any part of it inherits them. Not thread-safe: the owner locks.

    Attributes
    ----------
    free_bytes
        Sum of the free ranges, in bytes.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: list[tuple[int, int]] = []
        self._ranges: dict[int, Range] = {}
        self.free_bytes = 0

    def give(self, start: int, nbytes: int, fences: Iterable[Fence] = ()) -> None:
        """Make a range free, merging it with free neighbours.

        Raises
        ------
        ValueError
            If it is not whole pages or overlaps a free range.
        """
        if start % PAGE or nbytes % PAGE or nbytes <= 0 or start < 0:
            raise ValueError(f"{nbytes} bytes at {start} are not whole pages")
        at = bisect_left(self._starts, start)
        before = self._ranges[self._starts[at - 1]] if at else None
        after = self._ranges[self._starts[at]] if at < len(self._starts) else None
        overlaps = (before and before.end > start) or (after and start + nbytes > after.start)
        if overlaps:
            raise ValueError(f"{nbytes} bytes at {start} are free already")
        held = list(fences)
        end = start + nbytes
        if after and after.start == end:
            self._remove(after)
            held += after.fences
            end += after.nbytes
        if before and before.end == start:
            self._remove(before)
            held += before.fences
            start = before.start
        self._insert(Range(start, end - start, latest(held)))

    def best(self, nbytes: int) -> int | None:
        """Size of the smallest free range that holds ``nbytes``, or None."""
        at = bisect_left(self._sizes, (nbytes, -1))
        return self._sizes[at][0] if at < len(self._sizes) else None

    def take(self, nbytes: int) -> Range | None:
        """Take ``nbytes`` (whole pages) from the smallest free range that holds them."""
        at = bisect_left(self._sizes, (nbytes, -1))
        if at == len(self._sizes):
            return None
        return self._split(self._ranges[self._sizes[at][1]], nbytes)

    def gather(self, nbytes: int) -> list[Range] | None:
        """Take ``nbytes`` (whole pages) in as few ranges as best fit gives, or nothing."""
        if nbytes > self.free_bytes:
            return None
        taken: list[Range] = []
        while nbytes:
            part = self.take(nbytes) or self._split(self._ranges[self._sizes[-1][1]], nbytes)
            taken.append(part)
            nbytes -= part.nbytes
        return taken

    def ranges(self) -> list[Range]:
        """Free ranges in order of address."""
        return [self._ranges[start] for start in self._starts]

    def _split(self, whole: Range, nbytes: int) -> Range:
        self._remove(whole)
        if whole.nbytes <= nbytes:
            return whole
        self._insert(Range(whole.start + nbytes, whole.nbytes - nbytes, whole.fences))
        return Range(whole.start, nbytes, whole.fences)

    def _insert(self, it: Range) -> None:
        insort(self._starts, it.start)
        insort(self._sizes, (it.nbytes, it.start))
        self._ranges[it.start] = it
        self.free_bytes += it.nbytes

    def _remove(self, it: Range) -> None:
        del self._starts[bisect_left(self._starts, it.start)]
        del self._sizes[bisect_left(self._sizes, (it.nbytes, it.start))]
        del self._ranges[it.start]
        self.free_bytes -= it.nbytes
