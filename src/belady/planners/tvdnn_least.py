"""What compute stalls for at least on one side of a chain, whatever set of gaps is taken."""

from __future__ import annotations

import numpy as np

from belady.planners.spread import Bytes, Times
from belady.planners.tvdnn_chain import Chain, Side

# Cells of the table along seconds; along bytes at most so many, fewer for many gaps.
_SECONDS, _BYTES, _ALL_BYTES = 48, 1024, 80_000


class Least:
    """A table for each gap, made by dynamic programming from the peak outwards.

    A cell stands for all sets of the gaps before that one which have so many bytes, and whose
    copies keep the lane busy for so long after its own may begin. Which gaps they are is forgotten:
    what of their bytes is away by when is guessed in favour of the set. Between two cells the
    table is read such that it stays a bound: more bytes are no worse, and who is later by a second
    stalls for at most a second more.
    """

    def __init__(self, chain: Chain, side: Side) -> None:
        self._side, self._need = side, chain.need
        count = len(chain.nbytes)
        self._rows = min(_BYTES, _ALL_BYTES // count + 1)
        self._byte = chain.need / self._rows
        self._second = float(side.seconds.sum()) / _SECONDS or 1.0
        takes = side.seconds > 0
        self._rate = float((chain.nbytes[takes] / side.seconds[takes]).min(initial=np.inf))
        nbytes, late = np.meshgrid(
            np.arange(self._rows + 1) * self._byte,
            np.arange(_SECONDS + 1) * self._second,
            indexing="ij",
        )
        # Who has used no gap by the last has made no room.
        self._tables = [np.full(nbytes.shape, np.inf)] * (count + 1)
        for index in reversed(range(count)):
            more, later = nbytes + chain.nbytes[index], late + side.seconds[index]
            enough = np.maximum(0.0, later - (side.end - side.begin[index]))
            further = self._skipped(index, np.minimum(more, chain.need), later)
            used = np.where(more < chain.need, further, enough)
            self._tables[index] = np.minimum(used, self._skipped(index, nbytes, late))

    def stall(self, index: int, nbytes: Bytes | Times, late: Times) -> Times:
        """Seconds still to come, for sets of gaps before this one that have not made room yet.

        Parameters
        ----------
        nbytes
            Theirs.
        late
            Seconds for which the lane is busy after the copy of gap ``index`` may begin.
        """
        table = self._tables[index]
        row = np.minimum(np.ceil(nbytes / self._byte).astype(np.intp), self._rows)
        column = np.clip(late / self._second, 0.0, _SECONDS)
        low = column.astype(np.intp)
        high = np.minimum(low + 1, _SECONDS)
        least: Times = np.maximum(
            table[row, low], table[row, high] - (high - column) * self._second
        )
        return least

    def _skipped(self, index: int, nbytes: Times, late: Times) -> Times:
        """Seconds for sets that are decided up to and with a gap, at the time of that gap."""
        side, begin = self._side, self._side.begin[index]
        if index + 1 == len(side.begin):
            return self._tables[-1]
        stall = np.zeros(nbytes.shape)
        for row in range(side.passed[index], side.passed[index + 1]):
            # At best all that is not needed here is copied last, and takes the longest.
            spare = np.maximum(0.0, nbytes - side.need[row]) / self._rate
            stall = np.maximum(stall, late - spare - (side.due[row] - begin))
            stall[nbytes < side.need[row]] = np.inf
        left = late - np.where(np.isfinite(stall), stall, 0.0) - (side.begin[index + 1] - begin)
        further: Times = stall + self.stall(index + 1, nbytes, left)
        return further
