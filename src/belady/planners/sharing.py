"""Ops that several replays run: once, where there is room for what they make until it is read.

Backward reads the values of a block last first, and each of them is made again from where the block
begins. Alone, each replay runs what those before it have run: of five in a row the first op runs
five times. Where there is room, a value that one passes stays for the next. And of two that branch
off after the same op neither passes the other: the later one comes early, to where the first runs
that op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import inf

from belady.ir.plan import Recompute
from belady.ir.replay import seconds_of, shares, sources
from belady.ir.trace import Trace
from belady.planners.due import timed
from belady.planners.spread import Bytes
from belady.planners.ways import Ways
from belady.planners.wish import Away, Wish

# Part of what a replay runs alone that must be run where it comes early for it to be wished so.
_WORTH = 0.5
# Boundaries before its own at which a replay is looked for the same op: the nearest ones.
_NEAREST = 4


class Branches:
    """Replays that can come early, to where others run some of their ops.

    Asked for in the order of their boundaries, as each that has come early leaves its own: what
    would follow it there follows it to where it is.
    """

    def __init__(self, trace: Trace, replays: Mapping[int, Recompute]) -> None:
        self._trace, self._replays = trace, replays
        # Boundaries at which each op runs, ascending, and how many replays run it there.
        self._runs: dict[int, dict[int, int]] = {}
        self.order: list[int] = []
        for value in sorted(replays, key=lambda v: (replays[v].at, v)):
            if not shares(trace) or any(trace.ops[op].mutates for op in replays[value].ops):
                # What writes over something shares nothing.
                continue
            self.order.append(value)
            for op in replays[value].ops:
                runs = self._runs.setdefault(op, {})
                runs[replays[value].at] = runs.get(replays[value].at, 0) + 1

    def spared(self, value: int, reach: float) -> tuple[dict[int, float], float]:
        """Seconds that ``value`` need not run at each boundary up to ``reach`` ops early.

        And all that it runs alone where it is.
        """
        replay, found, alone = self._replays[value], dict[int, float](), 0.0
        for op in replay.ops:
            if self._runs[op][replay.at] > 1:
                continue
            seconds = self._trace.replays[op].device_seconds
            alone += seconds
            before = [at for at in self._runs[op] if at < replay.at][-_NEAREST:]
            for at in before:
                if seconds > 0 and replay.at - at <= reach:
                    found[at] = found.get(at, 0.0) + seconds
        return found, alone

    def bring(self, value: int, at: int) -> None:
        """``value`` comes early."""
        replay = self._replays[value]
        for op in replay.ops:
            runs = self._runs[op]
            runs[replay.at] -= 1
            if not runs[replay.at]:
                del runs[replay.at]
            runs[at] = runs.get(at, 0) + 1
            self._runs[op] = dict(sorted(runs.items()))


def early(trace: Trace, replays: Mapping[int, Recompute], reach: float) -> dict[int, Recompute]:
    """The replays, those of them up to ``reach`` ops early that run little of their own then."""
    if not reach:
        return {**replays}
    found, branches = dict[int, int](), Branches(trace, replays)
    for value in branches.order:
        spared, alone = branches.spared(value, reach)
        at = max(spared, key=lambda it: (spared[it], it), default=-1)
        if at >= 0 and spared[at] > _WORTH * alone:
            found[value] = at
            branches.bring(value, at)
    return timed(trace, replays, found)


def joined(trace: Trace, away: Away, ways: Ways, slack: Bytes) -> dict[int, Recompute] | None:
    """The replays, as many early as there is room for; None if that is none.

    Parameters
    ----------
    slack
        Bytes left over during each op.
    """
    replays, nbytes = away.replays, ways.nbytes
    slack, found, branches = slack.copy(), dict[int, int](), Branches(trace, replays)
    back = {value: it.at for value, it in replays.items()}
    back |= {value: it.ready_by for value, it in away.moves.items()}
    back |= {value: it.decode_at for value, it in away.encoded.items()}
    for value in branches.order:
        spared, _ = branches.spared(value, inf)
        begun = max((back.get(it, 0) for it in sources(trace, replays[value])), default=0)
        for at in sorted(spared, key=lambda it: (-spared[it], -it)):
            there = slice(at, replays[value].at)
            if at >= begun and (slack[there] >= nbytes[value]).all():
                slack[there] -= nbytes[value]
                found[value] = back[value] = at
                branches.bring(value, at)
                break
    return timed(trace, replays, found) if found else None


def passed(
    trace: Trace, away: Away, ways: Ways, slack: Bytes, wish: Wish
) -> dict[int, Recompute] | None:
    """The replays with what they pass held for those after them; None if there is no room.

    Parameters
    ----------
    slack
        Bytes left over during each op.
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
                return gap >= 0 and (gap <= wish.reach or source in stays)
            there = moves[source].ready_by <= at if source in moves else True
            return there and ways.last_reads[source] >= at

        return ways.cheapest(value, usable) or replays[value]

    found = timed(trace, {value: shorter(value) for value in replays})
    return early(trace, found, wish.early)


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
