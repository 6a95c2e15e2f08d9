"""Addresses for blocks whose lives are known, so that next to nothing is lost between them.

An iteration that is launched as it was captured takes and gives back the same blocks each time. An
allocator, which learns of one block after another, puts each into some hole that it fits into;
where all are known before, they can be packed (dynamic storage allocation, strongly NP-hard: Garey
and Johnson, 1979, problem SR2). Packed here as by Sekiyama et al. ("Profile-guided memory
optimization for deep neural networks", 2018, section 4) block after block, each as low as it fits
among those it lives with, and in many orders, as that which comes last lies highest.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappop, heappush
from time import perf_counter
from typing import NamedTuple

import numpy as np

from belady.simulate.coming import Coming, Life
from belady.simulate.stretch import LEAST

# Of orders beside the best so far, how many are gone on from although they are worse.
_WORSE = 0.03
# How often all that are to blame are moved, and how often another block is, too.
_ALL, _ANOTHER = 0.3, 0.3
# Gaps that are tried until a block lies as it would come to lie.
_TRIED = 16
# What is lost of what is held at once that is not worth another order.
_ENOUGH = 0.005


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
    while (best.hangs or best.end > enough) and perf_counter() < until:
        # The more of them hang, the more often all of them; what is worse then may be better soon.
        mended = rng.random() * (1 + len(here.astray)) > 1
        other = search.of(search.mended(here, rng) if mended else _moved(here, rng))
        if mended or _lowest(other) <= _lowest(here) or rng.random() < _WORSE:
            here = other
        best = min(best, other, key=_lowest)
    return Packing(lives, best.addresses, best.end)


class _Tried(NamedTuple):
    """An order, and the addresses it leads to.

    The end counts twice what hangs, if any does. Blamed are the blocks that do, else those at the
    end; ``astray`` are those of the former beside which others come at the same moment.
    """

    order: list[int]
    addresses: list[int]
    end: int
    blamed: list[int]
    astray: list[int]
    hangs: bool


def _lowest(tried: _Tried) -> tuple[bool, int, int]:
    # What lies elsewhere leaves what comes after it no place either, one after another. Of equal
    # ends that which fewer blocks reach is nearer to a lower one.
    return tried.hangs, tried.end, len(tried.blamed)


def _moved(tried: _Tried, rng: random.Random) -> list[int]:
    """An order in which a block that is to blame comes earlier, or all of them."""
    blamed = {*(tried.blamed if rng.random() < _ALL else [rng.choice(tried.blamed)])}
    places = [place for place, it in enumerate(tried.order) if it in blamed]
    order = [it for it in tried.order if it not in blamed]
    at = int(places[0] * rng.random())
    order[at:at] = [tried.order[place] for place in places]
    if rng.random() < _ANOTHER:
        order.insert(rng.randrange(len(order)), order.pop(rng.randrange(len(order))))
    return order


class _Search:
    def __init__(self, lives: Sequence[Life], small: int) -> None:
        self._coming = Coming(lives, small)
        self._small = small
        self._sizes, self._first, self._last = (
            np.array([it[field] for it in lives], dtype=np.int64) for field in range(3)
        )

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
            below[block] = self._placed(block, below)
        hanging = self._coming.hanging(below)
        # What comes with others is placed with them, in another order.
        alone = [it for it in hanging if it not in self._coming.mates]
        if alone:
            for block in alone:
                self._mend(block, below, hanging)
            hanging = self._coming.hanging(below)
        ends = below + self._sizes
        end = int(ends.max(initial=0))
        # What hangs has to lie elsewhere: as much as it takes counts as missing.
        end += sum(int(self._sizes[it]) for it in hanging)
        blamed = hanging or [int(it) for it in np.flatnonzero(ends == ends.max(initial=0))]
        astray = [it for it in hanging if it in self._coming.mates]
        return _Tried(order, [int(it) for it in below], end, blamed, astray, bool(hanging))

    def mended(self, tried: _Tried, rng: random.Random) -> list[int]:
        """An order in which what is astray comes with all that comes at the same moment."""
        place = {block: float(number) for number, block in enumerate(tried.order)}
        for block in tried.astray:
            mates = [*self._coming.mates[block]]
            rng.shuffle(mates)
            least = min(place[it] for it in mates)
            for number, it in enumerate(mates):
                place[it] = least + (number - len(mates)) / (len(mates) + 1)
        return sorted(place, key=place.__getitem__)

    def _placed(self, block: int, below: np.ndarray) -> int:
        """Where a block is to lie: in the lowest gap in which it would come to lie, if any."""
        found = self._gaps(block, below)
        mates = [it for it in self._coming.mates.get(block, ()) if it == block or below[it] >= 0]
        if len(mates) > 1:
            low, high = self._coming.between(block, mates, below)
            for address in [it for it in found if low < it < high][:_TRIED]:
                below[block] = address
                if self._coming.first_astray(mates, below) < 0:
                    return address
        return found[0]

    def _mend(self, block: int, below: np.ndarray, hanging: Sequence[int]) -> None:
        """Have a block that hangs lie where neither it nor any other than now does, if it can."""
        was = int(below[block])
        before = self._coming.near(block, below)
        found = self._gaps(block, below)
        for address in (*found[:_TRIED], *found[-2:]):
            below[block] = address
            others = {*before, *self._coming.near(block, below)}.difference(hanging)
            if not any(self._coming.hangs(it, below) for it in (block, *others)):
                return
        below[block] = was

    def _gaps(self, block: int, below: np.ndarray) -> list[int]:
        """Addresses in gaps between others that hold the block, the lowest first, and the end."""
        others = self._coming.beside[block]
        others = others[(below[others] >= 0) & (others != block)]
        if not len(others):
            return [0]
        others = others[np.argsort(below[others], kind="stable")]
        starts = below[others]
        ends = np.maximum.accumulate(starts + self._sizes[others])
        begins = np.concatenate(([0], ends))
        gaps = starts - begins[:-1]
        fits = np.flatnonzero(gaps >= self._sizes[block])
        # What lies right above another one is of one hole with it, if that comes now, too; apart
        # from it, with room for what fills what is between, it has its own.
        wide = fits[gaps[fits] > self._sizes[block] + self._small]
        end = int(begins[-1])
        found = (*begins[fits], *(starts[wide] - self._sizes[block]))
        return [*(int(it) for it in found), end, end + self._small + LEAST]
