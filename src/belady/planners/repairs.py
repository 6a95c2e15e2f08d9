"""Which replays to do without where a mix needs more memory than there is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from math import inf

import numpy as np

from belady.ir.plan import Encode, Recompute
from belady.ir.replay import sources
from belady.ir.scratch import replay_bytes
from belady.ir.trace import Trace
from belady.planners.moves import Case, read_by
from belady.planners.spread import Bytes, held_bytes
from belady.planners.ways import Ways

# Chooses replays to do without: of a case, its replays, what else is gone, an op and what it lacks.
Which = Callable[[Case, Mapping[int, Recompute], Collection[int], int, int], set[int]]

# What a value counts as beside its bytes, which many small ones are not to be copied for.
_LEAST_BYTES = 1 << 20
# Values that are made again early, more of which are not weighed one by one.
_MANY = 64


def worst(slack: Bytes) -> list[int]:
    """The op that lacks most in each stretch of ops that lack bytes."""
    short = np.flatnonzero(slack < 0)
    stretches = np.split(short, np.flatnonzero(np.diff(short) > 1) + 1)
    return [int(ops[np.argmin(slack[ops])]) for ops in stretches if len(ops)]


def heavy(
    case: Case, replays: Mapping[int, Recompute], gone: Collection[int], at: int, lacking: int
) -> set[int]:
    """Values whose replays take most bytes during an op, enough of them to give back ``lacking``.

    While one runs these are what it makes beside its value. Before and after, those of its
    sources that are ``gone`` and are back before backward itself reads them. Empty if none takes
    any.
    """
    trace, taken = case.trace, dict[int, int]()
    for value, replay in replays.items():
        if replay.at > at:
            continue
        early = (it for it in sources(trace, replay) if it in gone or it in replays)
        taken[value] = sum(held_bytes(case, it) for it in early if at < read_by(trace.values[it]))
        if replay.at == at:
            taken[value] += replay_bytes(trace, value, replay, case.hardware.allocator)
    found = set[int]()
    for value in sorted(taken, key=lambda value: (-taken[value], -value)):
        if lacking <= 0 or taken[value] <= 0:
            break
        found.add(value)
        lacking -= taken[value]
    return found


def light(
    case: Case, replays: Mapping[int, Recompute], gone: Collection[int], at: int, lacking: int
) -> set[int]:
    """Values to copy rather than to recompute, so that ``lacking`` bytes are free during an op.

    Each time the one that frees most of what is lacking for its own bytes, of equals the one that
    frees least: of values that are made again one from another, nothing before it need be there as
    early, and what is after it still is. Where several start from one value, none of them frees it
    alone: they count together too. Empty if none frees anything; those of `heavy` where so many
    values are made again early that to weigh all of them would take long.
    """
    early = _Early(case, replays, gone, at)
    if len(early.made) > _MANY:
        return heavy(case, replays, gone, at, lacking)
    found = frozenset[int]()
    held = early.held(found)
    while lacking > 0:
        left = {values - found for values in early.together} - {frozenset()}
        frees = {values: held - early.held(found | values) for values in left}
        own = {values: sum(early.nbytes[it] + _LEAST_BYTES for it in values) for values in left}
        best = max(
            frees,
            key=lambda of: (min(frees[of], lacking) / own[of], -frees[of], sorted(of)),
            default=found,
        )
        if frees.get(best, 0) <= 0:
            break
        found |= best
        held, lacking = held - frees[best], lacking - frees[best]
    return set(found)


def bulky(
    trace: Trace, encoded: Mapping[int, Encode], ways: Ways, at: int, lacking: int
) -> set[int]:
    """Encoded values that may give back ``lacking`` bytes during an op, if any, once they are not.

    Those first of which the largest part is left.
    """
    left = {
        value: ways.nbytes[value] - ways.saved[value]
        for value, it in encoded.items()
        if it.encode_at <= at < trace.values[value].dropped
        and ways.nbytes[value] > ways.saved[value]
    }
    found = set[int]()
    for value in sorted(left, key=lambda v: (-left[v] / ways.nbytes[v], v)):
        if lacking <= 0:
            break
        found.add(value)
        lacking -= left[value]
    return found


class _Early:
    """What is on the device during an op because replays start from it, before backward reads it.

    Parameters
    ----------
    gone
        Values that leave the device otherwise.

    Attributes
    ----------
    made
        Recomputed values on which it depends what is there.
    together
        Each of them, and all that start from one value.
    nbytes
        Their device bytes, and those of what they start from.
    """

    def __init__(
        self, case: Case, replays: Mapping[int, Recompute], gone: Collection[int], at: int
    ) -> None:
        trace, self._at = case.trace, at
        needed = {value: read_by(trace.values[value]) for value in (*gone, *replays)}
        starts = {
            value: [it for it in sources(trace, replay) if it in needed]
            for value, replay in replays.items()
            if replay.at <= at
        }
        self.made = frozenset(
            value
            for value, of in starts.items()
            if needed[value] >= at or any(needed[it] > at for it in of)
        )
        # A replay starts from what was produced before, so users come first here.
        self._order = sorted(self.made, key=lambda v: (-trace.values[v].producer, -v))
        self._starts = {value: starts[value] for value in self._order}
        users = (
            frozenset(value for value, of in self._starts.items() if source in of)
            for source in dict.fromkeys(chain.from_iterable(self._starts.values()))
        )
        self.together = {*(frozenset({value}) for value in self._order), *users}
        there = self.made.union(chain.from_iterable(self._starts.values()))
        self._needed = {value: needed[value] for value in there}
        self.nbytes = {value: held_bytes(case, value) for value in there}
        self._meanwhile = {
            value: replay_bytes(trace, value, replays[value], case.hardware.allocator)
            for value in self._order
        }

    def held(self, copied: Collection[int]) -> int:
        """Bytes of what is early, and of what replays make beside, if ``copied`` are not made."""
        due: dict[int, float] = {}
        nbytes = 0
        for value in self._order:
            if value in copied:
                continue
            here = min(due.get(value, inf), self._needed[value])
            nbytes += self._meanwhile[value] if here == self._at else 0
            for source in self._starts[value]:
                due[source] = min(here, due.get(source, inf))
        early = (value for value, here in due.items() if here <= self._at < self._needed[value])
        return nbytes + sum(self.nbytes[value] for value in early)
