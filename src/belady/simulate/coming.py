"""Whether blocks come to lie where a packing has them.

Torch's allocator puts a block into the smallest hole that holds it, of equal ones the lowest. What
else is free can be filled for a moment (`belady.memory.filling`), but for what is too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from belady.simulate.stretch import LEAST, divided

# Of more blocks that come at once none is asked whether it would lie there: that takes too long.
_MATES = 32


class Life(NamedTuple):
    """A block: its bytes, and the first and the last moment at which it is there.

    ``gone`` is how many blocks have come when it goes, where that is before the moment is over.
    """

    nbytes: int
    first: int
    last: int
    gone: int = 1 << 62


class _Hole(NamedTuple):
    nbytes: int
    address: int


class Coming:
    """Blocks as they come, each to an address that was chosen for it.

    Addresses are those of all blocks, ``below``, of which -1 stands for none yet.

    Parameters
    ----------
    lives
        Blocks of more than ``small`` bytes, in the order in which they come.
    small
        Most bytes that cannot be filled.

    Attributes
    ----------
    beside
        For each block those that are there together with it, itself among them.
    mates
        For each that does not come alone those that come at the same moment, itself among them,
        unless these are many.
    """

    def __init__(self, lives: Sequence[Life], small: int) -> None:
        self._lives, self._small = lives, small
        self._sizes, self._first, last, gone = (
            np.array([it[field] for it in lives], dtype=np.int64) for field in range(4)
        )
        numbers = np.arange(len(lives))
        # What goes before another one comes at the same moment can lie where that does.
        self.beside = [
            np.flatnonzero(
                (self._first <= it.last)
                & (last >= it.first)
                & (numbers < it.gone)
                & (gone > number)
            )
            for number, it in enumerate(lives)
        ]
        moments = dict[int, list[int]]()
        for block, it in enumerate(lives):
            moments.setdefault(it.first, []).append(block)
        self._together = [blocks for blocks in moments.values() if len(blocks) > 1]
        few = [blocks for blocks in self._together if len(blocks) <= _MATES]
        self.mates = {it: blocks for blocks in few for it in blocks}

    def hanging(self, below: np.ndarray) -> list[int]:
        """Blocks that would come to lie elsewhere than they are to.

        That is where what is free below one is too small to be filled with a block, or is to be
        taken at the same moment by one that comes later.
        """
        found = [it for it in range(len(self._lives)) if self._falls(it, below)]
        # Each takes the smallest hole that holds it, and what is left for neighbours is one.
        return found + [
            it for some in self._together if (it := self.first_astray(some, below)) >= 0
        ]

    def hangs(self, block: int, below: np.ndarray) -> bool:
        """Whether one of them would, or one that comes at the same moment."""
        mates = self.mates.get(block, ())
        return self._falls(block, below) or bool(mates and self.first_astray(mates, below) >= 0)

    def near(self, block: int, below: np.ndarray) -> list[int]:
        """Blocks that come after it, and above it by no more than cannot be filled."""
        beside = self.beside[block]
        above = below[beside] - (below[block] + self._sizes[block])
        near = beside[(above >= 0) & (above <= self._small) & (beside > block)]
        return [int(it) for it in near]

    def between(self, block: int, mates: Sequence[int], below: np.ndarray) -> tuple[int, int]:
        """Addresses between which a block has to lie: of equal holes the lowest is used first."""
        equal = [it for it in mates if self._sizes[it] == self._sizes[block]]
        before = (it for it in equal if it < block < self._lives[it].gone)
        after = (it for it in equal if block < it < self._lives[block].gone)
        low = max((int(below[it]) for it in before), default=-1)
        return low, min((int(below[it]) for it in after), default=1 << 62)

    def first_astray(self, blocks: Sequence[int], below: np.ndarray) -> int:
        """The first of those that come at one moment that would lie in another hole; -1 for none.

        Only those that have an address are given.
        """
        holes = [self._widened(it, blocks[0], below) for it in self._holes(blocks, below)]
        # Here the holes lie one behind the other, with walls in between.
        begins = [0, *accumulate(it.nbytes + LEAST for it in holes)]
        stretch, there = divided([it.nbytes for it in holes], LEAST), dict[int, int]()
        for block in blocks:
            for before in [it for it in there if self._lives[it].gone <= block]:
                stretch.free(there.pop(before))
            at = int(below[block])
            number = max(n for n, it in enumerate(holes) if it.address <= at)
            there[block] = stretch.take(int(self._sizes[block]))
            if there[block] != begins[number] + at - holes[number].address:
                return block
        return -1

    def _falls(self, block: int, below: np.ndarray) -> bool:
        beside = self.beside[block]
        # Of those that come at the same moment, what comes later is not there yet.
        earlier = beside[(self._first[beside] <= self._lives[block].first) & (beside < block)]
        ends = below[earlier] + self._sizes[earlier]
        gap = int(below[block]) - int(ends[ends <= below[block]].max(initial=0))
        return 0 < gap <= self._small

    def _holes(self, blocks: Sequence[int], below: np.ndarray) -> list[_Hole]:
        holes = list[_Hole]()
        for block in sorted(blocks, key=lambda it: below[it]):
            address, nbytes = int(below[block]), int(self._sizes[block])
            last = holes[-1] if holes else None
            if last is not None and address - (last.address + last.nbytes) <= self._small:
                end = max(address + nbytes, last.address + last.nbytes)
                holes[-1] = _Hole(end - last.address, last.address)
            else:
                holes.append(_Hole(nbytes, address))
        return holes

    def _widened(self, hole: _Hole, block: int, below: np.ndarray) -> _Hole:
        """A hole with what is free above it and too small to be filled, when ``block`` comes."""
        beside, moment = self.beside[block], self._lives[block].first
        above = below[beside[self._first[beside] < moment]] - (hole.address + hole.nbytes)
        gap = int(above[above >= 0].min(initial=self._small + 1))
        return hole if gap > self._small else _Hole(hole.nbytes + gap, hole.address)
