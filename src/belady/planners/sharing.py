"""Ops that several replays run: once, where there is room for what they make until it is read.

Backward reads the values of a block last first, and each of them is made again from where the block
begins. Alone, each replay runs what those before it have run: of five in a row the first op runs
five times. Where there is room, a value that one passes stays for the next. And of two that branch
off after the same op neither passes the other: the later one comes early, to where the first runs
that op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import NamedTuple

from belady.ir.plan import Recompute
from belady.ir.replay import seconds_of, shares, sources
from belady.ir.trace import Trace
from belady.planners.due import timed
from belady.planners.spread import Bytes
from belady.planners.ways import Ways
from belady.planners.wish import Away

# Part of what a replay runs alone that must be run where it comes early for it to be wished so.
_WORTH = 0.5


class Branch(NamedTuple):
    """A replay that could come early, to where others run some of its ops.

    Attributes
    ----------
    value
        What it makes.
    at
        Boundary of the others.
    seconds
        What it need not run then.
    share
        Part that this is of what it alone runs at its own boundary.
    """

    value: int
    at: int
    seconds: float
    share: float


def branches(
    trace: Trace, replays: Mapping[int, Recompute], reach: float = inf
) -> Iterator[Branch]:
    """Replays that could come early, by up to ``reach`` ops; none where each runs alone."""
    if not shares(trace):
        return
    runs: dict[int, Counter[int]] = {}
    for replay in replays.values():
        for op in replay.ops:
            runs.setdefault(op, Counter())[replay.at] += 1
    for value, replay in replays.items():
        own = [op for op in replay.ops if runs[op][replay.at] == 1]
        spared: dict[int, float] = {}
        for op in own:
            for at in runs[op]:
                if replay.at - reach <= at < replay.at:
                    spared[at] = spared.get(at, 0.0) + trace.replays[op].device_seconds
        alone = sum(trace.replays[op].device_seconds for op in own)
        for at, seconds in spared.items():
            if seconds > 0:
                yield Branch(value, at, seconds, seconds / alone)


def early(trace: Trace, replays: Mapping[int, Recompute], reach: float) -> dict[int, Recompute]:
    """The replays, those of them early that run little of their own then, see `branches`."""
    best: dict[int, Branch] = {}
    for branch in branches(trace, replays, reach) if reach else ():
        known = best.get(branch.value, branch)
        if branch.share > _WORTH:
            best[branch.value] = max(branch, known, key=lambda it: (it.seconds, it.at))
    return timed(trace, replays, {value: it.at for value, it in best.items()})


def joined(trace: Trace, away: Away, ways: Ways, slack: Bytes) -> dict[int, Recompute] | None:
    """The replays, as many early as there is room for; None if that is none.

    Those that save most seconds for their bytes come first.

    Parameters
    ----------
    slack
        Bytes left over during each op.
    """
    replays, nbytes = away.replays, ways.nbytes
    slack, found = slack.copy(), dict[int, int]()
    back = {value: it.at for value, it in replays.items()}
    back |= {value: it.ready_by for value, it in away.moves.items()}
    back |= {value: it.decode_at for value, it in away.encoded.items()}
    for value, at, _, _ in sorted(
        branches(trace, replays), key=lambda it: (-it.seconds / nbytes[it.value], -it.at, it.value)
    ):
        last = replays[value].at
        begun = all(back.get(source, at) <= at for source in sources(trace, replays[value]))
        if value not in found and begun and (slack[at:last] >= nbytes[value]).all():
            slack[at:last] -= nbytes[value]
            found[value] = back[value] = at
    return timed(trace, replays, found) if found else None


def passed(
    trace: Trace, away: Away, ways: Ways, slack: Bytes, reach: float
) -> dict[int, Recompute] | None:
    """The replays with what they pass held for those after them; None if there is no room.

    Parameters
    ----------
    slack
        Bytes left over during each op.
    reach
        See `belady.planners.wish.Wish`.
    """
    replays, moves = away.replays, away.moves
    stays = held(trace, replays, passing(trace, replays), ways.nbytes, slack)
    if not stays:
        return None

    def shorter(value: int) -> Recompute:
        at = trace.values[value].first_read or 0

        def usable(source: int) -> bool:
            if source in away.encoded:
                return False
            if source in replays:
                gap = (trace.values[source].first_read or 0) - at
                return gap >= 0 and (gap <= reach or source in stays)
            there = moves[source].ready_by <= at if source in moves else True
            return there and ways.last_reads[source] >= at

        return ways.cheapest(value, usable) or replays[value]

    return timed(trace, {value: shorter(value) for value in replays})


def held(
    trace: Trace,
    replays: Mapping[int, Recompute],
    ways: Mapping[int, list[int]],
    nbytes: Mapping[int, int],
    slack: Bytes,
) -> frozenset[int]:
    """Recomputed values to be held from where a replay passes them, for which there is room.

    Those that save most seconds for their bytes come first.

    Parameters
    ----------
    ways
        What is passed, see `passing`.
    nbytes
        Device bytes of each of ``replays``.
    slack
        Bytes left over during each op.
    """
    slack, found = slack.copy(), set[int]()
    gain = {
        value: len(boundaries) * seconds_of(trace, replays[value]) / nbytes[value]
        for value, boundaries in ways.items()
    }
    for value in sorted(ways, key=lambda v: (-gain[v], v)):
        first, last = min(ways[value]), replays[value].at
        if (slack[first:last] >= nbytes[value]).all():
            slack[first:last] -= nbytes[value]
            found.add(value)
    return frozenset(found)


def unshared(trace: Trace, replays: Mapping[int, Recompute]) -> dict[int, Recompute]:
    """Of each replay the ops that no other one runs at its boundary: what is spared without it."""
    if not shares(trace):
        return {**replays}
    runs = Counter((it.at, op) for it in replays.values() for op in it.ops)
    return {
        value: replace(it, ops=tuple(op for op in it.ops if runs[it.at, op] == 1))
        for value, it in replays.items()
    }


def passing(trace: Trace, replays: Mapping[int, Recompute]) -> dict[int, list[int]]:
    """Boundaries at which a value is made on the way to another, before its own replay."""
    made: dict[int, list[int]] = {}
    for value in replays:
        made.setdefault(trace.values[value].producer, []).append(value)
    found: dict[int, list[int]] = {}
    for value, replay in replays.items():
        for op in replay.ops:
            for other in made.get(op, ()):
                if other != value and replay.at < replays[other].at:
                    found.setdefault(other, []).append(replay.at)
    return found
