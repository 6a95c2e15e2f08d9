"""Memory that is left over, given to copies: they begin earlier and may end later.

A plan that fits with its copies as short as they can be (nothing hidden) leaves room at most
ops. That room is spread over values that stay and copies under way.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from belady.ir.curves import curve
from belady.ir.hardware import Link
from belady.ir.margin import rooms
from belady.ir.plan import Offload, Plan
from belady.ir.residency import offload_boundaries
from belady.ir.timeline import Lane, Timeline
from belady.ir.trace import Tier, Trace
from belady.planners.moves import Case
from belady.simulate.routes import routes

# A copy is small that takes the link less than so many times what the host takes to issue it.
_SMALL = 4.0

Bytes = NDArray[np.int64]
Times = NDArray[np.float64]
Route = list[tuple[Lane, Link]]


class Spread:
    """One distribution of the memory that is left over, with boundary times given.

    Attributes
    ----------
    moves
        What still leaves the device.
    slack
        Bytes that are left over during each op.
    """

    def __init__(
        self, case: Case, moves: Mapping[int, Offload], times: Times, slack: Bytes
    ) -> None:
        trace = case.trace
        self._case, self._trace = case, trace
        self._times = times
        self._anchors = trace.anchors or range(len(trace.ops) + 1)
        self.moves = dict(moves)
        self.slack = slack.copy()
        self._nbytes = {value: held_bytes(case, value) for value in moves}
        self._alone = alone(trace, moves)
        # Of few tiers, for each value of each mix that is tried.
        ways = {tier: routes(case.hardware, tier) for tier in {it.tier for it in moves.values()}}
        self._seconds = {
            value: copy_seconds(trace, value, *ways[it.tier]) for value, it in moves.items()
        }

    def keep(self, reserve: float) -> None:
        """Let values stay that fit beside the reserve, in the order of `asked`.

        Parameters
        ----------
        reserve
            Bytes left untouched, in multiples of the largest value.
        """
        order = [value for value in asked(self._case, self.moves) if value in self._alone]
        windows = {value: self._away(value) for value in order}
        largest = max((self._nbytes[value] for value in order), default=0)
        for value in keep(windows, self._nbytes, self.slack, reserve * largest):
            del self.moves[value]
            self._alone.remove(value)

    def widen(self) -> None:
        """Let copies take longer: bytes go later and come back earlier, if memory allows."""
        self._delay_frees()
        self._hasten_returns()

    def _away(self, value: int) -> tuple[int, int]:
        """Boundaries between which the bytes are really away from the device."""
        _, free, back = offload_boundaries(self._trace, self.moves[value])
        storage = self._trace.storages[self._trace.values[value].storage]
        return max(free, storage.released), back

    def _delay_frees(self) -> None:
        """Let each original stay until its copy is expected to have ended, if memory allows.

        The last copy comes first: who waits for it has waited for those before it, so that they
        need not stay any longer.
        """
        ends = self._copy_ends()
        for value in reversed(ends):
            start, stop = self._away(value)
            # What others hold until `start`, such as a residual, frees nothing before it.
            until = start
            if value in self._alone:
                # The engine acts at anchors: at the next one if there is room until then.
                ended = self._next_anchor(int(self._times.searchsorted(ends[value])))
                wanted = min(ended, stop - 1)
                until = max(until, first_short(self.slack, start, wanted, self._nbytes[value]))
            until = self._last_anchor(until)
            self.slack[start:until] -= self._nbytes[value]
            self.moves[value] = replace(self.moves[value], free_at=until)

    def _copy_ends(self) -> dict[int, float]:
        """When each copy-out is expected to have ended, in the order in which they are issued."""
        ends: dict[int, float] = {}
        lane_free = 0.0
        for value in sorted(self.moves, key=lambda v: (self.moves[v].copy_out_after, v)):
            begun = max(lane_free, float(self._times[self.moves[value].copy_out_after + 1]))
            lane_free = ends[value] = begun + self._seconds[value][0]
        return ends

    def _hasten_returns(self) -> None:
        """Start each copy-in early enough to be there in time, if memory allows."""
        due = self._due_times()
        for value in sorted(self.moves, key=lambda v: (self.moves[v].ready_by, v)):
            if value not in self._alone:
                continue
            move = self.moves[value]
            start, stop = self._away(value)
            begun = int(self._times.searchsorted(due[value], side="right")) - 1
            wanted = self._last_anchor(begun)
            since = last_short(self.slack, max(wanted, start), stop, self._nbytes[value])
            since = self._next_anchor(since)
            if since <= start:
                # There is room all the way from the save: it need not leave at all.
                self.slack[start:stop] -= self._nbytes[value]
                del self.moves[value]
            elif since < stop:
                self.slack[since:stop] -= self._nbytes[value]
                self.moves[value] = replace(move, copy_in_at=since)

    def _due_times(self) -> dict[int, float]:
        """Latest start of each copy-in so that it and all after it on the lane are in time."""
        due: dict[int, float] = {}
        lane = np.inf
        for value in sorted(self.moves, key=lambda v: (self.moves[v].ready_by, v), reverse=True):
            end = min(lane, float(self._times[self.moves[value].ready_by]))
            lane = due[value] = end - self._seconds[value][1]
        return due

    def _last_anchor(self, boundary: int) -> int:
        at = bisect_right(self._anchors, boundary) - 1
        return self._anchors[at] if at >= 0 else 0

    def _next_anchor(self, boundary: int) -> int:
        at = bisect_left(self._anchors, boundary)
        return self._anchors[at] if at < len(self._anchors) else len(self._trace.ops)


def first_short(slack: Bytes, start: int, stop: int, nbytes: int) -> int:
    """First op from ``start`` to ``stop`` that has no room for ``nbytes``, or ``stop``."""
    (short,) = (slack[start:stop] < nbytes).nonzero()
    return start + int(short[0]) if len(short) else stop


def last_short(slack: Bytes, start: int, stop: int, nbytes: int) -> int:
    """One past the last op from ``start`` to ``stop`` that has no room, or ``start``."""
    (short,) = (slack[start:stop] < nbytes).nonzero()
    return start + int(short[-1]) + 1 if len(short) else start


def keep(
    windows: Mapping[int, tuple[int, int]], nbytes: Mapping[int, int], slack: Bytes, reserve: float
) -> list[int]:
    """Values that fit into the slack beside the reserve, first come, first served.

    Parameters
    ----------
    windows
        Boundaries between which each value would be away, in the order in which they are asked.
    slack
        Bytes left over during each op; what is kept is taken off.
    reserve
        Bytes left untouched; all of them where that is infinite.
    """
    spare = slack - np.minimum(slack, reserve)
    kept = []
    for value, (start, stop) in windows.items():
        if (spare[start:stop] >= nbytes[value]).all():
            spare[start:stop] -= nbytes[value]
            slack[start:stop] -= nbytes[value]
            kept.append(value)
    return kept


def asked(case: Case, moves: Mapping[int, Offload]) -> list[int]:
    """Copied values in the order in which they may stay: those read first before others.

    Before them the smallest of those that cost the host about as much as the link: of the same
    bytes it issues fewer copies, the larger they are.
    """
    link = case.hardware.link(Tier.DEVICE, Tier.HOST)

    def turn(value: int) -> tuple[float, int, int]:
        nbytes = held_bytes(case, value)
        small = link is not None and link.seconds(nbytes) < _SMALL * link.issue_s
        return nbytes if small else inf, moves[value].ready_by, value

    return sorted(moves, key=turn)


def held_bytes(case: Case, value: int) -> int:
    """Device bytes of a value, allocator rounding included."""
    storage = case.trace.storages[case.trace.values[value].storage]
    return case.hardware.allocator.held(storage.nbytes)


def alone(trace: Trace, values: Iterable[int]) -> set[int]:
    """Those that share their storage with no other of ``values``: each can stay by itself."""
    storages = Counter(trace.values[value].storage for value in values)
    return {value for value in values if storages[trace.values[value].storage] == 1}


def slack_of(case: Case, plan: Plan) -> Bytes:
    """Bytes that the budget leaves during each op under the plan."""
    held = curve(case.trace, plan, case.hardware.allocator)
    room = rooms(case.trace, case.hardware.allocator, case.budget.device_bytes)
    return np.array(room, dtype=np.int64) - np.array(held, dtype=np.int64)


def boundary_times(trace: Trace, timeline: Timeline | None) -> Times:
    """Seconds at which compute reaches each boundary: predicted, or without any stall."""
    if timeline is None:
        host = trace.device == "cpu"
        spent = [op.device_seconds + (op.host_seconds if host else 0.0) for op in trace.ops]
        return np.concatenate(([0.0], np.cumsum(spent)))
    times = np.full(len(trace.ops) + 1, timeline.seconds)
    for span in timeline.spans:
        if span.lane is Lane.COMPUTE and span.op >= 0:
            # A replay comes before the op at its boundary.
            times[span.op] = min(times[span.op], span.start_s)
    return np.minimum.accumulate(times[::-1])[::-1]


def copy_seconds(trace: Trace, value: int, out: Route, back: Route) -> tuple[float, float]:
    """Duration of the copy-out and of the copy-in; through several links, of the slowest."""
    nbytes = trace.storages[trace.values[value].storage].nbytes
    return (
        max(link.seconds(nbytes) for _, link in out),
        max(link.seconds(nbytes) for _, link in back),
    )
