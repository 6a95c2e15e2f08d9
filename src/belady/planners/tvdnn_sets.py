"""Sets of the first gaps of a chain, and what their copies have come to: arrays, a row a set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from belady.planners.spread import Bytes, Times
from belady.planners.tvdnn_chain import Chain, Side

# How many sets of equal bytes each one is compared with.
_NEAR = 4


@dataclass(frozen=True, slots=True)
class Lane:
    """One side of each set.

    Attributes
    ----------
    stalled
        Seconds for which compute has stalled.
    busy
        Clock at which the last copy is over.
    away
        Clock at which the bytes are away that each row still to come needs; infinite if the set
        does not make that room.
    """

    stalled: Times
    busy: Times
    away: Times

    def at(self, chosen: NDArray[np.intp] | slice) -> Lane:
        """Some of the sets."""
        return Lane(self.stalled[chosen], self.busy[chosen], self.away[chosen])

    def copied(self, side: Side, index: int, before: Bytes, after: Bytes) -> Lane:
        """With the copy of one more gap, which changes the bytes of each set."""
        busy = np.maximum(self.busy, side.begin[index] + self.stalled) + side.seconds[index]
        rows = slice(side.passed[index], None)
        need = side.need[rows]
        now = (before[:, None] < need) & (need <= after[:, None]) & (index < side.among[rows])
        return Lane(self.stalled, busy, np.where(now, busy[:, None], self.away))

    def moved(self, side: Side, index: int) -> Lane:
        """When the copy of the next gap may begin."""
        count = side.passed[index + 1] - side.passed[index]
        due = side.due[side.passed[index] : side.passed[index + 1]]
        waits = (self.away[:, :count] - due).max(axis=1, initial=-inf)
        return Lane(np.maximum(self.stalled, waits), self.busy, self.away[:, count:])

    def ended(self, side: Side, index: int) -> Times:
        """Seconds of stall on this side if no further gap is used."""
        waits = (self.away - side.due[side.passed[index] :]).max(axis=1, initial=-inf)
        stalled: Times = np.maximum(np.maximum(self.stalled, self.busy - side.end), waits)
        return stalled

    def key(self, side: Side, index: int) -> Times:
        """All that matters from here on, the less the better."""
        busy = np.maximum(self.busy, side.begin[index] + self.stalled)
        away = np.maximum(self.away, side.due[side.passed[index] :] + self.stalled[:, None])
        return np.column_stack((self.stalled, busy, away))


@dataclass(frozen=True, slots=True)
class Sets:
    """Sets of the first gaps of a chain.

    Attributes
    ----------
    used
        Whether each gap is.
    nbytes
        Theirs.
    least
        Seconds for which compute stalls at least, in the end.
    lanes
        One by side.
    """

    used: NDArray[np.bool_]
    nbytes: Bytes
    least: Times
    lanes: Sequence[Lane]

    def __len__(self) -> int:
        return len(self.nbytes)

    def at(self, chosen: NDArray[np.intp] | slice) -> Sets:
        """Some of them."""
        lanes = [lane.at(chosen) for lane in self.lanes]
        return Sets(self.used[chosen], self.nbytes[chosen], self.least[chosen], lanes)

    def beside(self, other: Sets) -> Sets:
        """These and those."""
        return Sets(
            np.concatenate((self.used, other.used)),
            np.concatenate((self.nbytes, other.nbytes)),
            np.concatenate((self.least, other.least)),
            [
                Lane(
                    np.concatenate((one.stalled, two.stalled)),
                    np.concatenate((one.busy, two.busy)),
                    np.concatenate((one.away, two.away)),
                )
                for one, two in zip(self.lanes, other.lanes, strict=True)
            ],
        )

    def having(self, chain: Chain, index: int) -> Sets:
        """With one gap more."""
        used, nbytes = self.used.copy(), self.nbytes + chain.nbytes[index]
        used[:, index] = True
        lanes = [
            lane.copied(side, index, self.nbytes, nbytes)
            for lane, side in zip(self.lanes, chain.sides, strict=True)
        ]
        return Sets(used, nbytes, self.least, lanes)

    def moved(self, chain: Chain, index: int) -> Sets:
        """When the copies of the next gap may begin, with the stalls until then."""
        lanes = [
            lane.moved(side, index) for lane, side in zip(self.lanes, chain.sides, strict=True)
        ]
        return replace(self, lanes=lanes, least=lanes[0].stalled + lanes[1].stalled)

    def undominated(self, chain: Chain, index: int) -> NDArray[np.intp]:
        """Which have no other of as many bytes beside them that is no worse in anything.

        The same bytes come up often where layers are equal, and hardly ever elsewhere.
        """
        _, group, count = np.unique(self.nbytes, return_inverse=True, return_counts=True)
        twins = np.flatnonzero(count[group] > 1)
        keys = np.concatenate(
            [
                lane.at(twins).key(side, index)
                for lane, side in zip(self.lanes, chain.sides, strict=True)
            ],
            axis=1,
        )
        order = np.lexsort((keys.sum(axis=1), self.least[twins], group[twins]))
        keys, group = keys[order], group[twins][order]
        first, here = np.searchsorted(group, group), np.arange(len(order))
        worse = np.zeros(len(order), dtype=np.bool_)
        for distance in range(1, _NEAR + 1):
            for other in (here - distance, first + distance - 1):
                pairs = np.flatnonzero((first <= other) & (other < here) & ~worse)
                worse[pairs] = (keys[other[pairs]] <= keys[pairs]).all(axis=1)
        stays = np.ones(len(self), dtype=np.bool_)
        stays[twins[order[worse]]] = False
        return np.flatnonzero(stays)


def nothing(chain: Chain) -> Sets:
    """The empty set alone."""
    zero = np.zeros(1)
    return Sets(
        used=np.zeros((1, len(chain.nbytes)), dtype=np.bool_),
        nbytes=np.zeros(1, dtype=np.int64),
        least=zero,
        lanes=[
            Lane(zero, np.full(1, -inf), np.full((1, len(side.need)), inf)) for side in chain.sides
        ],
    )
