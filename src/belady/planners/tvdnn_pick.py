"""Which gaps tvDNN's heuristic uses: those that make room, and others in their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from belady.planners.spread import Bytes, Times
from belady.planners.tvdnn import Gap, Swapping

_NOBODY: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Draft:
    """A set that is being made, and the bytes that it lacks at each op."""

    used: set[int]
    lack: Bytes


class Picks:
    """Sets of gaps, by index, that make room at every op.

    Parameters
    ----------
    swapping
        One in which there is room when all gaps are used.
    """

    def __init__(self, swapping: Swapping) -> None:
        self._swapping = swapping
        gaps = swapping.gaps
        self._gone, self._back, self._nbytes = (
            np.array([getattr(gap, name) for gap in gaps], dtype=np.int64)
            for name in ("gone", "back", "nbytes")
        )
        self._idle = np.array([_idle(gap, *swapping.times) for gap in gaps])
        self._worth = np.where(self._idle >= 0, self._nbytes * self._idle, self._idle)

    def slack(self, chosen: Iterable[int]) -> Bytes:
        """Bytes left during each op when these gaps are used for as long as they may be."""
        slack = self._swapping.slack.copy()
        for index in set(range(len(self._nbytes))).difference(chosen):
            slack[self._gone[index] : self._back[index]] -= self._nbytes[index]
        return slack

    def pick(self, reserve: float) -> frozenset[int]:
        """At the worst op the gap of most worth, until there is room; less what is needless then.

        Parameters
        ----------
        reserve
            Bytes to leave beside, in multiples of the largest storage, where using all gaps would.
        """
        spare = int(reserve * self._nbytes.max(initial=0))
        lack = self._swapping.over + np.clip(self._swapping.slack, 0, spare)
        it = _Draft(set(), lack)
        self._fill(it, self._worth, _NOBODY)
        self._give_back(it, self._worth, _NOBODY)
        return frozenset(it.used)

    def turned(self, chosen: frozenset[int], group: frozenset[int]) -> Iterator[frozenset[int]]:
        """The set with this group turned: in it what was not, out of it what was.

        Others make the room that is missing then. Once those of most worth, beside all that was
        used, which may leave room for copies under way; once those that are idle for longest, so
        that many small ones may stand for a large one, less what is needless then. No set at all
        where there is no room without what goes.
        """
        out = group & chosen
        if self.slack(set(range(len(self._nbytes))) - out).min(initial=0) < 0:
            return
        start = chosen ^ group
        lack = -self.slack(start)
        rich = _Draft(set(start), lack.copy())
        self._fill(rich, self._worth, out)
        yield frozenset(rich.used)
        lean = _Draft(set(start), lack)
        self._fill(lean, self._idle, out)
        self._give_back(lean, self._idle, group)
        yield frozenset(lean.used)

    def _fill(self, it: _Draft, worth: Times, closed: frozenset[int]) -> None:
        """Use the best gap at the worst op, but for closed ones, until nothing lacks."""
        free = np.ones(len(worth), dtype=np.bool_)
        free[[*it.used, *closed]] = False
        while it.lack.max(initial=0) > 0:
            worst = int(it.lack.argmax())
            covering = np.flatnonzero(free & (self._gone <= worst) & (worst < self._back))
            best = int(covering[worth[covering].argmax()])
            it.used.add(best)
            free[best] = False
            it.lack[self._gone[best] : self._back[best]] -= self._nbytes[best]

    def _give_back(self, it: _Draft, worth: Times, stay: frozenset[int]) -> None:
        """Give back what later picks have made needless, the worst first."""
        for index in sorted(it.used - stay, key=lambda index: (float(worth[index]), index)):
            during = slice(self._gone[index], self._back[index])
            if (it.lack[during] + self._nbytes[index] <= 0).all():
                it.lack[during] += self._nbytes[index]
                it.used.remove(index)


def _idle(gap: Gap, done: Times, resumed: Times) -> float:
    """Seconds that the copies of a gap leave of its time; negative where they take longer."""
    copies = sum(gap.out_s.values()) + max(gap.in_s.values(), default=0.0)
    return float(resumed[gap.back] - done[gap.out]) - copies
