"""Branch and bound over the sets of gaps of a chain."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from belady.planners.tvdnn_chain import Chain
from belady.planners.tvdnn_least import Least
from belady.planners.tvdnn_sets import Sets, nothing

# Sets that are taken further at a time: their rows and columns, on all levels, fill memory.
_FEWEST, _CELLS = 256, 1 << 23


@dataclass(frozen=True, slots=True)
class Best:
    """The best set of gaps, and what is known of all others.

    Attributes
    ----------
    used
        By index in the chain; None if none is better than what was known before.
    stall
        Seconds for which no set stalls less, but for those that are no better than the best.
    complete
        Whether there was time for all sets.
    """

    used: list[int] | None
    stall: float
    complete: bool


class Search:
    """Makes sets gap by gap, the outermost first, and leaves those that cannot be the best.

    What the copies of a set have come to is known exactly; for what is to come there is a bound
    (`belady.planners.tvdnn_least`). The most promising sets are taken further first, in batches.

    Parameters
    ----------
    cost
        Seconds of stall, and what the bytes cost, of what is to be beaten.
    byte_cost
        Seconds that a moved byte counts as.
    gap
        Seconds for which it is not worth looking for.
    """

    def __init__(self, chain: Chain, cost: float, byte_cost: float, gap: float) -> None:
        self._chain = chain
        self._count = len(chain.nbytes)
        self._batch = max(_FEWEST, _CELLS // self._count**2)
        self._cost, self._byte_cost, self._gap = cost, byte_cost, gap
        self._bounds = [Least(chain, side) for side in chain.sides]
        self._used: list[int] | None = None

    def run(self, deadline: float) -> Best:
        """Search until that time of `time.monotonic`."""
        # How many gaps are decided, and the sets that have not made room at the peak yet.
        stack = [(0, nothing(self._chain))]
        while stack and time.monotonic() < deadline:
            index, sets = stack.pop()
            sets = self._worth(sets)
            if len(sets) > self._batch:
                stack.append((index, sets.at(slice(self._batch, None))))
                sets = sets.at(slice(self._batch))
            more = sets.having(self._chain, index)
            self._finish(index, more.at(np.flatnonzero(more.nbytes >= self._chain.need)))
            if index + 1 < self._count and len(sets):
                more = more.at(np.flatnonzero(more.nbytes < self._chain.need))
                stack.append((index + 1, self._further(index, sets.beside(more))))
        left = [float(sets.least.min(initial=inf)) for _, sets in stack]
        return Best(self._used, min(left, default=inf), complete=not stack)

    def _worth(self, sets: Sets) -> Sets:
        """Those that may still be better than the best."""
        least = sets.least + self._byte_cost * self._chain.need
        return sets.at(np.flatnonzero(least < self._cost - self._gap))

    def _finish(self, index: int, sets: Sets) -> None:
        """Note the best of sets that make room at the peak."""
        cost = self._byte_cost * sets.nbytes
        for lane, side in zip(sets.lanes, self._chain.sides, strict=True):
            cost = cost + lane.ended(side, index)
        if cost.min(initial=inf) < self._cost:
            at = int(cost.argmin())
            self._cost, self._used = float(cost[at]), np.flatnonzero(sets.used[at]).tolist()

    def _further(self, index: int, sets: Sets) -> Sets:
        """Those worth it when the copies of the next gap may begin, the most promising first."""
        sets, after = self._worth(sets.moved(self._chain, index)), index + 1
        least = sets.least.copy()
        for lane, side, bound in zip(sets.lanes, self._chain.sides, self._bounds, strict=True):
            late = lane.busy - (side.begin[after] + lane.stalled)
            least += bound.stall(after, sets.nbytes, late)
        sets = self._worth(replace(sets, least=least))
        stays = sets.undominated(self._chain, after)
        return sets.at(stays[np.argsort(sets.least[stays], kind="stable")])
