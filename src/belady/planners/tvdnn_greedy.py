"""tvDNN's heuristic: the policy ``tvdnn_greedy``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Budget, Offload, Plan
from belady.ir.timeline import Lane
from belady.ir.trace import Trace
from belady.planners.base import assemble, attempt, finish
from belady.planners.moves import Case
from belady.planners.spread import Bytes, Times, boundary_times
from belady.planners.tvdnn import Gap, Swapping
from belady.simulate.engine import simulate

# Bytes left for copies under way when gaps are picked, in multiples of the largest storage.
_RESERVES = (0.0, 1.0, 2.0, 4.0, 8.0)
# Stalls change when copies are due: a schedule is replayed this often.
_ROUNDS = 3
# Schedules that are simulated, and ops in all of them: a large trace gets fewer.
_FEWEST, _MOST, _OPS = 4, 150, 50_000
# Share of the iteration below which stalls are not worth another try.
_NOTHING = 1e-4


@dataclass(frozen=True, slots=True)
class TvdnnGreedy:
    """Fill the worst moment first: swap what is largest and idle for longest.

    Reconstruction of the heuristic that the poster names (`belady.planners.tvdnn`), with what its
    descendants added:

    1. While some op needs more than the budget: at the worst of them, take the gap that has the
       largest product of bytes and slack, slack being what its copies leave of its time; where no
       slack is left, the gap that costs the least stall (Capuchin's free time). What later picks
       have made needless is given back.
    2. Copies take turns on the bus of their direction: out as early as they may, back as late as
       is in time, earlier if the bus is taken. Bytes go when the copy-out has ended and come when
       the copy-in begins, sooner and later where memory is short.
    3. The schedule is simulated; ops that waited move copies (Capuchin's feedback), for a few
       rounds.
    4. Other picks are tried in simulation: with memory left for copies under way, then with
       neighbours in time used or not, in ever smaller groups.
    """

    name: str = "tvdnn_greedy"
    version: int = 1
    recomputes: bool = False

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`; every plan of this policy is exact."""
        swapping = Swapping(Case(trace, hardware, budget, exact))
        return schedule(swapping, f"{self.name}/{self.version}")


TVDNN_GREEDY = TvdnnGreedy()


def schedule(swapping: Swapping, planner: str) -> Plan:
    """Fastest schedule that the heuristic finds.

    Raises
    ------
    InfeasibleBudgetError
        If the budget does not even do when all gaps are used.
    """
    least = finish(swapping.case, swapping.draft(planner, swapping.floor.moves, _REASON))
    nothing = attempt(swapping.case, swapping.draft(planner, {}, _REASON))
    return nothing or _Search(swapping, planner, least).run()


_REASON = "moved: tvDNN's heuristic found no room for it between its uses"


class _Search:
    """Tries sets of gaps, by index, and keeps the fastest plan."""

    def __init__(self, swapping: Swapping, planner: str, best: Plan) -> None:
        self._swapping = swapping
        self._case = swapping.case
        self._planner = planner
        self._best = best
        self._left = max(_FEWEST, min(_MOST, _OPS // max(1, len(self._case.trace.ops))))
        self._enough = (1 + _NOTHING) * swapping.keep_seconds
        self._seconds: dict[frozenset[int], float] = {}

    def run(self) -> Plan:
        at = min((pick(self._swapping, reserve) for reserve in _RESERVES), key=self._try)
        for group in _neighbours(len(self._swapping.gaps)):
            if self._left <= 0 or self._best.predicted_seconds <= self._enough:
                break
            at = min(at, at ^ group, key=self._try)
        return self._best

    def _try(self, chosen: frozenset[int]) -> float:
        if chosen not in self._seconds:
            self._seconds[chosen] = inf
            slack = _slack(self._swapping, chosen)
            times: Times | None = boundary_times(self._case.trace, None)
            for _ in range(_ROUNDS):
                if times is None or slack.min(initial=0) < 0 or self._left <= 0:
                    break
                self._left -= 1
                times = self._replay(chosen, times, slack)
        return self._seconds[chosen]

    def _replay(self, chosen: frozenset[int], times: Times, slack: Bytes) -> Times | None:
        """Simulate the schedule for these times; give those that come of it if ops waited."""
        case = self._case
        gaps = [self._swapping.gaps[index] for index in sorted(chosen)]
        moves = place(case.trace, gaps, times, slack.copy())
        plan = assemble(case, self._swapping.draft(self._planner, moves, _REASON))
        timeline = simulate(case.trace, case.hardware, plan)
        self._seconds[chosen] = min(self._seconds[chosen], timeline.seconds)
        if timeline.seconds < self._best.predicted_seconds:
            verdict = check(case.trace, case.hardware, plan, case.budget)
            if not verdict.ok:
                return None
            self._best = replace(
                plan,
                predicted_peak_bytes=verdict.peak_bytes,
                predicted_seconds=timeline.seconds,
            )
        stalled = timeline.stall_seconds > _NOTHING * timeline.seconds
        return boundary_times(case.trace, timeline) if stalled else None


def _neighbours(count: int) -> Iterator[frozenset[int]]:
    """Groups of neighbouring indices, ever smaller."""
    size = count
    while size > 1:
        size = (size + 1) // 2
        for first in range(0, count, size):
            yield frozenset(range(first, min(first + size, count)))


def _slack(swapping: Swapping, chosen: Iterable[int]) -> Bytes:
    slack = swapping.slack.copy()
    for index in set(range(len(swapping.gaps))).difference(chosen):
        gap = swapping.gaps[index]
        slack[gap.gone : gap.back] -= gap.nbytes
    return slack


def pick(swapping: Swapping, reserve: float) -> frozenset[int]:
    """Indices of gaps that make room: at the worst op the best gap, until there is enough.

    Parameters
    ----------
    reserve
        Bytes to leave beside, in multiples of the largest storage, where using all gaps would.
    """
    gaps = swapping.gaps
    gone, back, nbytes = (
        np.array([getattr(gap, name) for gap in gaps]) for name in ("gone", "back", "nbytes")
    )
    worth = np.array([_worth(gap, *swapping.times) for gap in gaps])
    over = swapping.over + np.clip(swapping.slack, 0, int(reserve * nbytes.max(initial=0)))
    used: list[int] = []
    free = np.ones(len(gaps), dtype=np.bool_)
    while over.max(initial=0) > 0:
        worst = int(over.argmax())
        covering = np.flatnonzero(free & (gone <= worst) & (worst < back))
        best = int(covering[worth[covering].argmax()])
        used.append(best)
        free[best] = False
        over[gone[best] : back[best]] -= nbytes[best]
    needed = set(used)
    for index in sorted(used, key=lambda index: float(worth[index])):
        if (over[gone[index] : back[index]] + nbytes[index] <= 0).all():
            over[gone[index] : back[index]] += nbytes[index]
            needed.remove(index)
    return frozenset(needed)


def _worth(gap: Gap, done: Times, resumed: Times) -> float:
    copies = sum(gap.out_s.values()) + max(gap.in_s.values(), default=0.0)
    slack = float(resumed[gap.back] - done[gap.out]) - copies
    return gap.nbytes * slack if slack >= 0 else slack


def place(trace: Trace, gaps: list[Gap], times: Times, slack: Bytes) -> dict[int, Offload]:
    """Moves of these gaps, in order of copy-out, as both buses and memory allow.

    Parameters
    ----------
    times
        Seconds at which compute is expected to reach each boundary.
    slack
        Bytes left during each op if all are away for as long as may be; what is used is taken off.
    """
    anchors = np.array(trace.anchors or range(len(trace.ops) + 1))
    frees = _frees(gaps, times, slack, anchors)
    backs = _returns(gaps, frees, times, slack, anchors)
    moves: dict[int, Offload] = {}
    for gap, free, back in zip(gaps, frees, backs, strict=True):
        if free < back:
            moves |= gap.away(free, back)
    return dict(sorted(moves.items()))


def _frees(gaps: list[Gap], times: Times, slack: Bytes, anchors: Bytes) -> list[int]:
    """Boundary at which each goes: when its copy-out has ended, sooner where memory is short."""
    ends: list[float] = []
    lanes: dict[Lane, float] = {}
    for gap in gaps:
        end = float(times[gap.out])
        for lane, seconds in gap.out_s.items():
            lanes[lane] = end = max(end, lanes.get(lane, 0.0)) + seconds
        ends.append(end)
    frees = [gap.gone for gap in gaps]
    # Who waits for the last copy has waited for those before it, so these need not stay longer.
    for index in reversed(range(len(gaps))):
        gap = gaps[index]
        wanted = min(_from(anchors, int(np.searchsorted(times, ends[index]))), gap.back)
        short = np.flatnonzero(slack[gap.gone : wanted] < gap.nbytes)
        until = _until(anchors, gap.gone + int(short[0])) if len(short) else wanted
        if until > gap.gone:
            slack[gap.gone : until] -= gap.nbytes
            frees[index] = until
    return frees


def _returns(
    gaps: list[Gap], frees: list[int], times: Times, slack: Bytes, anchors: Bytes
) -> list[int]:
    """Boundary at which each comes: just early enough, later where memory is short."""
    starts: dict[int, float] = {}
    lanes: dict[Lane, float] = {}
    order = sorted(range(len(gaps)), key=lambda index: (gaps[index].back, index))
    for index in reversed(order):
        start = float(times[gaps[index].back])
        for lane, seconds in reversed(list(gaps[index].in_s.items())):
            lanes[lane] = start = min(start, lanes.get(lane, inf)) - seconds
        starts[index] = start
    backs = [gap.back for gap in gaps]
    for index in order:
        gap, free = gaps[index], frees[index]
        wanted = int(np.searchsorted(times, starts[index], side="right")) - 1
        wanted = max(_until(anchors, wanted), free)
        short = np.flatnonzero(slack[wanted : gap.back] < gap.nbytes)
        since = _from(anchors, wanted + int(short[-1]) + 1) if len(short) else wanted
        if gap.alone and since < gap.back:
            slack[since : gap.back] -= gap.nbytes
            backs[index] = since
    return backs


def _from(anchors: Bytes, boundary: int) -> int:
    """First anchor at or after a boundary, or a boundary beyond all."""
    at = int(np.searchsorted(anchors, boundary))
    return int(anchors[at]) if at < len(anchors) else sys.maxsize


def _until(anchors: Bytes, boundary: int) -> int:
    """Last anchor at or before a boundary, or -1."""
    at = int(np.searchsorted(anchors, boundary, side="right")) - 1
    return int(anchors[at]) if at >= 0 else -1
