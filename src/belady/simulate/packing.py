"""Addresses for blocks whose lives are known, so that next to nothing is lost between them.

An iteration that is launched as it was captured takes and gives back the same blocks each time. An
allocator, which learns of one block after another, puts each into some hole that it fits into;
where all are known before, they can be packed (dynamic storage allocation, strongly NP-hard: Garey
and Johnson, 1979, problem SR2). Packed here as by Sekiyama et al. ("Profile-guided memory
optimization for deep neural networks", 2018, section 4) block after block, each where it fits
tightest among those it lives with, and in many orders, as that which comes last lies highest.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

import numpy as np

from belady.simulate.stretch import LEAST, divided

# Of orders beside the best so far, how many are gone on from although they are worse.
_WORSE = 0.03
# How often another block is moved too.
_ANOTHER = 0.3
# Of more blocks that come at once none is asked whether it would lie there: that takes too long.
_MATES = 32
# Gaps that are tried until a block lies as it would come to lie.
_TRIED = 16
# What is lost of what is held at once that is not worth another order.
_ENOUGH = 0.005


class Life(NamedTuple):
    """A block: its bytes, and the first and the last moment at which it is there.

    ``gone`` is how many blocks have come when it goes, where that is before the moment is over.
    """

    nbytes: int
    first: int
    last: int
    gone: int = 1 << 62


class Packing(NamedTuple):
    """Blocks, in the order in which they come; where each begins, and where the highest ends.

    ``small_bytes`` is what blocks take that are too small to be packed, in pages of their own.
    """

    lives: Sequence[Life]
    addresses: Sequence[int]
    end: int
    small_bytes: int = 0


def held_bytes(lives: Sequence[Life]) -> int:
    """The most that is there at once: no packing ends below it."""
    there, held, most = list[tuple[int, int, int]](), 0, 0
    for number, it in enumerate(lives):
        while there and there[0][:2] <= (it.first, number):
            held -= heappop(there)[2]
        heappush(there, (it.last, it.gone, it.nbytes))
        held += it.nbytes
        most = max(most, held)
    return most


def packed(lives: Sequence[Life], small: int, most_s: float) -> Packing:
    """The first packing found that loses next to nothing, else the lowest.

    Parameters
    ----------
    lives
        Blocks of more than ``small`` bytes, in the order in which they come.
    small
        What lies below a block when it comes, down to the next one that is there, is nothing or
        more than so many bytes: what fills it has to be a block too.
    most_s
        Seconds after which no other order is tried.
    """
    enough = (1 + _ENOUGH) * held_bytes(lives)
    search, until = _Search(lives, small), perf_counter() + most_s
    best = min((search.of(order) for order in search.orders()), key=_lowest)
    here, rng = best, random.Random(0)
    while best.end > enough and perf_counter() < until:
        # The more of them hang, the more often all of them; what is worse then may be better soon.
        mended = rng.random() * (1 + len(here.astray)) > 1
        other = search.of(search.mended(here, rng) if mended else _moved(here, rng))
        if mended or _lowest(other) <= _lowest(here) or rng.random() < _WORSE:
            here = other
        best = min(best, other, key=_lowest)
    return Packing(lives, best.addresses, best.end)


class _Tried(NamedTuple):
    """An order, and the addresses it leads to.

    The end counts twice what hangs. Blamed are the blocks that do, else those at the end;
    ``astray`` are those of the former beside which others come at the same moment.
    """

    order: list[int]
    addresses: list[int]
    end: int
    blamed: list[int]
    astray: list[int]


def _lowest(tried: _Tried) -> int:
    return tried.end


def _moved(tried: _Tried, rng: random.Random) -> list[int]:
    """An order in which a block that is to blame comes earlier."""
    order = [*tried.order]
    block = rng.choice(tried.blamed)
    place = order.index(block)
    order.insert(int(place * rng.random()), order.pop(place))
    if rng.random() < _ANOTHER:
        order.insert(rng.randrange(len(order)), order.pop(rng.randrange(len(order))))
    return order


class _Hole(NamedTuple):
    nbytes: int
    address: int


class _Search:
    def __init__(self, lives: Sequence[Life], small: int) -> None:
        self._small = small
        self._lives = lives
        self._sizes, self._first, self._last = (
            np.array([it[field] for it in lives], dtype=np.int64) for field in range(3)
        )
        numbers, gone = np.arange(len(lives)), np.array([it.gone for it in lives], dtype=np.int64)
        # What goes before another one comes at the same moment can lie where that does.
        self._beside = [
            np.flatnonzero(
                (self._first <= it.last)
                & (self._last >= it.first)
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
        self._mates = {it: blocks for blocks in few for it in blocks}

    def orders(self) -> list[list[int]]:
        """Orders to begin with: large blocks first, those that stay long, or both at once."""
        sizes, spans = self._sizes, self._last - self._first + 1
        keys = (
            np.lexsort((-spans, -sizes)),
            np.argsort(-sizes * spans),
            np.lexsort((-sizes, -spans)),
        )
        return [[int(it) for it in key] for key in keys]

    def of(self, order: list[int]) -> _Tried:
        """What an order leads to."""
        below = np.full(len(order), -1, dtype=np.int64)
        for block in order:
            beside = self._beside[block]
            below[block] = self._placed(block, beside[below[beside] >= 0], below)
        ends = below + self._sizes
        end = int(ends.max(initial=0))
        hanging = self._hanging(below, ends)
        # What hangs has to lie elsewhere: as much as it takes counts as missing.
        end += sum(int(self._sizes[it]) for it in hanging)
        blamed = hanging or [int(it) for it in np.flatnonzero(ends == ends.max(initial=0))]
        astray = [it for it in hanging if it in self._mates]
        return _Tried(order, [int(it) for it in below], end, blamed, astray)

    def mended(self, tried: _Tried, rng: random.Random) -> list[int]:
        """An order in which what is astray comes with all that comes at the same moment."""
        place = {block: float(number) for number, block in enumerate(tried.order)}
        for block in tried.astray:
            mates = [*self._mates[block]]
            rng.shuffle(mates)
            least = min(place[it] for it in mates)
            for number, it in enumerate(mates):
                place[it] = least + (number - len(mates)) / (len(mates) + 1)
        return sorted(place, key=place.__getitem__)

    def _placed(self, block: int, others: np.ndarray, below: np.ndarray) -> int:
        """Where a block is to lie: in the tightest gap in which it would come to lie, if any."""
        found = self._gaps(block, others, below)
        mates = [it for it in self._mates.get(block, ()) if it == block or below[it] >= 0]
        if len(mates) > 1:
            low, high = self._between(block, mates, below)
            for address in [it for it in found if low < it < high][:_TRIED]:
                below[block] = address
                if self._first_astray(mates, below) < 0:
                    return address
        return found[0]

    def _between(self, block: int, mates: Sequence[int], below: np.ndarray) -> tuple[int, int]:
        """Addresses between which a block has to lie: of equal holes the lowest is used first."""
        equal = [it for it in mates if self._sizes[it] == self._sizes[block]]
        before = (it for it in equal if it < block < self._lives[it].gone)
        after = (it for it in equal if block < it < self._lives[block].gone)
        low = max((int(below[it]) for it in before), default=-1)
        return low, min((int(below[it]) for it in after), default=1 << 62)

    def _gaps(self, block: int, others: np.ndarray, below: np.ndarray) -> list[int]:
        """Addresses in gaps between others that hold the block, the tightest first, and the end."""
        if not len(others):
            return [0]
        others = others[np.argsort(below[others], kind="stable")]
        starts = below[others]
        ends = np.maximum.accumulate(starts + self._sizes[others])
        begins = np.concatenate(([0], ends))
        gaps = starts - begins[:-1]
        fits = np.flatnonzero(gaps >= self._sizes[block])
        tightest = fits[np.argsort(gaps[fits], kind="stable")]
        # What lies right above another one is of one hole with it, if that comes now, too; apart
        # from it, with room for what fills what is between, it has its own.
        wide = tightest[gaps[tightest] > self._sizes[block] + self._small]
        end = int(begins[-1])
        found = (*begins[tightest], *(starts[wide] - self._sizes[block]))
        return [*(int(it) for it in found), end, end + self._small + LEAST]

    def _hanging(self, below: np.ndarray, ends: np.ndarray) -> list[int]:
        """Blocks that would come to lie lower than they are to.

        That is where what is free below one is too small to be filled with a block, or is to be
        taken at the same moment by one that comes later.
        """
        found = []
        for block, life in enumerate(self._lives):
            beside = self._beside[block]
            there = beside[(self._first[beside] <= life.first) & (beside != block)]
            # Of those that come at the same moment, what comes later is not there yet.
            earlier = there[there < block]
            lower = ends[earlier[ends[earlier] <= below[block]]]
            gap = int(below[block]) - int(lower.max(initial=0))
            if 0 < gap <= self._small:
                found.append(block)
        return found + self._astray(below)

    def _astray(self, below: np.ndarray) -> list[int]:
        """Blocks that would lie where another one is to that comes at the same moment.

        Each takes the smallest hole that holds it, and what is left for neighbours is one.
        """
        return [it for blocks in self._together if (it := self._first_astray(blocks, below)) >= 0]

    def _first_astray(self, blocks: Sequence[int], below: np.ndarray) -> int:
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
        beside, moment = self._beside[block], self._lives[block].first
        above = below[beside[self._first[beside] < moment]] - (hole.address + hole.nbytes)
        gap = int(above[above >= 0].min(initial=self._small + 1))
        return hole if gap > self._small else _Hole(hole.nbytes + gap, hole.address)
