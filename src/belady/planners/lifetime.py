"""Move what must move, and spread its copies over the time between its uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Budget, Offload, Plan
from belady.ir.residency import curve, offload_boundaries
from belady.ir.timeline import Lane, Timeline
from belady.ir.trace import Tier, Trace
from belady.planners.base import Draft, assemble, finish
from belady.planners.floor import FLOOR
from belady.planners.moves import Case
from belady.simulate.engine import routes, simulate

# Bytes left for copies under way rather than for kept values, in multiples of the largest move.
_RESERVES = (0.0, 2.0, 6.0)
# Copies make compute wait, which changes when copies are due: times are settled in rounds.
_ROUNDS = 2
# Share of the iteration below which stalls are not worth another try.
_NOTHING = 0.002

_Bytes = NDArray[np.int64]
_Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Belady's rule on lifetimes: what is needed again last leaves first.

    It starts from `belady.planners.floor.Floor` and gives back the memory that the budget leaves:
    first to values whose gap between save and read is nearest to the turn from forward to
    backward, which stay; then to copies under way, so that a copy-out ends before its bytes must
    be gone and a copy-in begins early enough. How much of each is tried in simulation.
    """

    name: str = "lifetime"
    version: int = 1

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`; every plan of this policy is exact."""
        case = Case(trace, hardware, budget, exact)
        floor = FLOOR.draft(case)
        least = replace(floor, planner=f"{self.name}/{self.version}")
        best = finish(case, least)
        slack = _slack(case, least)
        if not least.moves or slack.min(initial=0) < 0:
            return best
        for reserve in _RESERVES:
            times = _boundary_times(trace, None)
            for _ in range(_ROUNDS):
                moves = _Round(case, least.moves, times).spread(slack, reserve)
                plan = _spread_plan(case, least, moves)
                timeline = simulate(trace, hardware, plan)
                if timeline.seconds < best.predicted_seconds and _fits(case, plan):
                    best = replace(plan, predicted_seconds=timeline.seconds)
                if timeline.stall_seconds <= _NOTHING * timeline.seconds:
                    return _judged(case, best)
                times = _boundary_times(trace, timeline)
        return _judged(case, best)


def _spread_plan(case: Case, least: Draft, moves: dict[int, Offload]) -> Plan:
    reasons = dict.fromkeys(moves, "moved: the budget has no room for it meanwhile")
    kept = "kept: the budget has room for it between save and read"
    return assemble(case, replace(least, moves=moves, reasons=reasons, kept=kept))


def _fits(case: Case, plan: Plan) -> bool:
    return check(case.trace, case.hardware, plan, case.budget).ok


def _judged(case: Case, plan: Plan) -> Plan:
    peak = check(case.trace, case.hardware, plan, case.budget).peak_bytes
    return replace(plan, predicted_peak_bytes=peak)


class _Round:
    """One distribution of the memory that is left over, with boundary times given."""

    def __init__(self, case: Case, moves: Mapping[int, Offload], times: _Times) -> None:
        trace = case.trace
        self._trace = trace
        self._times = times
        self._anchors = np.array(trace.anchors or range(len(trace.ops) + 1))
        self._moves = dict(moves)
        self._nbytes = {
            value: case.hardware.allocator.held(trace.storages[trace.values[value].storage].nbytes)
            for value in moves
        }
        storages = Counter(trace.values[value].storage for value in moves)
        # Values that share a storage hold it together; they stay as the floor has them.
        self._alone = {v for v in moves if storages[trace.values[v].storage] == 1}
        self._seconds = {value: _copy_seconds(case, value, moves[value].tier) for value in moves}

    def spread(self, slack: _Bytes, reserve: float) -> dict[int, Offload]:
        """Keep what fits beside the reserve, then widen the windows of the other copies."""
        slack = slack.copy()
        self._keep(slack, reserve)
        self._delay_frees(slack)
        self._hasten_returns(slack)
        return self._moves

    def _away(self, value: int) -> tuple[int, int]:
        """Boundaries between which the bytes are really away from the device."""
        _, free, back = offload_boundaries(self._trace, self._moves[value])
        storage = self._trace.storages[self._trace.values[value].storage]
        return max(free, storage.released), back

    def _keep(self, slack: _Bytes, reserve: float) -> None:
        largest = max(self._nbytes.values())
        spare = slack - np.minimum(slack, int(reserve * largest))
        for value in sorted(self._alone, key=lambda v: (self._moves[v].ready_by, v)):
            start, stop = self._away(value)
            nbytes = self._nbytes[value]
            if (spare[start:stop] >= nbytes).all():
                spare[start:stop] -= nbytes
                slack[start:stop] -= nbytes
                del self._moves[value]
        self._alone &= self._moves.keys()

    def _delay_frees(self, slack: _Bytes) -> None:
        """Let each original stay until its copy is expected to have ended, if memory allows."""
        lane_free = 0.0
        for value in sorted(self._moves, key=lambda v: (self._moves[v].copy_out_after, v)):
            move = self._moves[value]
            begun = max(lane_free, float(self._times[move.copy_out_after + 1]))
            lane_free = begun + self._seconds[value][0]
            if value not in self._alone:
                continue
            start, stop = self._away(value)
            wanted = min(int(np.searchsorted(self._times, lane_free)), stop - 1)
            until = self._last_anchor(_first_short(slack, start, wanted, self._nbytes[value]))
            if until > start:
                slack[start:until] -= self._nbytes[value]
                self._moves[value] = replace(move, free_at=until)

    def _hasten_returns(self, slack: _Bytes) -> None:
        """Start each copy-in early enough to be there in time, if memory allows."""
        due = self._due_times()
        for value in sorted(self._moves, key=lambda v: (self._moves[v].ready_by, v)):
            if value not in self._alone:
                continue
            move = self._moves[value]
            start, stop = self._away(value)
            wanted = int(np.searchsorted(self._times, due[value], side="right")) - 1
            since = _last_short(slack, max(wanted, start), stop, self._nbytes[value])
            since = self._next_anchor(since)
            if since <= start:
                # There is room all the way from the save: it need not leave at all.
                slack[start:stop] -= self._nbytes[value]
                del self._moves[value]
            elif since < stop:
                slack[since:stop] -= self._nbytes[value]
                self._moves[value] = replace(move, copy_in_at=since)

    def _due_times(self) -> dict[int, float]:
        """Latest start of each copy-in so that it and all after it on the lane are in time."""
        due: dict[int, float] = {}
        lane = np.inf
        for value in sorted(self._moves, key=lambda v: (self._moves[v].ready_by, v), reverse=True):
            end = min(lane, float(self._times[self._moves[value].ready_by]))
            lane = due[value] = end - self._seconds[value][1]
        return due

    def _last_anchor(self, boundary: int) -> int:
        at = int(np.searchsorted(self._anchors, boundary, side="right")) - 1
        return int(self._anchors[at]) if at >= 0 else 0

    def _next_anchor(self, boundary: int) -> int:
        at = int(np.searchsorted(self._anchors, boundary))
        return int(self._anchors[at]) if at < len(self._anchors) else len(self._trace.ops)


def _first_short(slack: _Bytes, start: int, stop: int, nbytes: int) -> int:
    """First op from ``start`` to ``stop`` that has no room for ``nbytes``, or ``stop``."""
    short = np.flatnonzero(slack[start:stop] < nbytes)
    return start + int(short[0]) if len(short) else stop


def _last_short(slack: _Bytes, start: int, stop: int, nbytes: int) -> int:
    """One past the last op from ``start`` to ``stop`` that has no room, or ``start``."""
    short = np.flatnonzero(slack[start:stop] < nbytes)
    return start + int(short[-1]) + 1 if len(short) else start


def _slack(case: Case, draft: Draft) -> _Bytes:
    """Bytes that the budget leaves during each op under the draft."""
    held = curve(case.trace, assemble(case, draft), case.hardware.allocator)
    room = case.hardware.allocator.peak_within(case.budget.device_bytes)
    return room - np.array(held, dtype=np.int64)


def _boundary_times(trace: Trace, timeline: Timeline | None) -> _Times:
    """Seconds at which compute reaches each boundary: predicted, or without any stall."""
    if timeline is None:
        host = trace.device == "cpu"
        spent = [op.device_seconds + (op.host_seconds if host else 0.0) for op in trace.ops]
        return np.concatenate(([0.0], np.cumsum(spent)))
    times = np.full(len(trace.ops) + 1, timeline.seconds)
    for span in timeline.spans:
        if span.lane is Lane.COMPUTE and span.op >= 0 and span.value < 0:
            times[span.op] = span.start_s
    return np.minimum.accumulate(times[::-1])[::-1]


def _copy_seconds(case: Case, value: int, tier: Tier) -> tuple[float, float]:
    """Duration of the copy-out and of the copy-in; through several links, of the slowest."""
    nbytes = case.trace.storages[case.trace.values[value].storage].nbytes
    out, back = routes(case.hardware, tier)
    return (
        max(link.seconds(nbytes) for _, link in out),
        max(link.seconds(nbytes) for _, link in back),
    )


LIFETIME = Lifetime()
