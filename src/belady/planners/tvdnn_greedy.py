"""tvDNN's heuristic: the policy ``tvdnn_greedy``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.planners.base import assemble, attempt, finish
from belady.planners.moves import Case
from belady.planners.spread import Times, boundary_times
from belady.planners.traits import Traits
from belady.planners.tvdnn import Swapping
from belady.planners.tvdnn_pick import Picks
from belady.planners.tvdnn_place import place
from belady.simulate.engine import simulate

# Bytes left for copies under way when gaps are picked, in multiples of the largest storage.
_RESERVES = (0.0, 1.0, 2.0, 4.0, 8.0)
# Stalls change when copies are due: a schedule is replayed this often.
_ROUNDS = 3
# Schedules that are simulated, and ops in all of them: a large trace gets fewer.
_FEWEST, _MOST, _OPS = 4, 300, 50_000
# How far apart in the order of saves two gaps may be that are tried in each other's place.
_NEAR = 8
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
       rounds, while that helps.
    4. Other picks are tried in simulation: with memory left for copies under way; then groups of
       neighbours in time are turned, used ones out and unused ones in, ever smaller down to single
       gaps, and one gap in the place of another near it. Others make the room that is missing
       then: on the way to a better set, one large gap often has to give way to many small ones.
       This goes on while it gains and tries are left.
    """

    name: str = "tvdnn_greedy"
    version: int = 2
    traits: Traits = Traits(slices_modules=True)

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
        self._picks = Picks(swapping)
        self._left = max(_FEWEST, min(_MOST, _OPS // max(1, len(self._case.trace.ops))))
        self._enough = (1 + _NOTHING) * swapping.keep_seconds
        self._seconds: dict[frozenset[int], float] = {}

    def run(self) -> Plan:
        at = min((self._picks.pick(reserve) for reserve in _RESERVES), key=self._try)
        before, count = None, len(self._swapping.gaps)
        while at != before:
            before = at
            at = self._descend(at, _groups(count))
            at = self._descend(at, _swaps(at, count))
        return self._best

    def _descend(self, at: frozenset[int], groups: Iterable[frozenset[int]]) -> frozenset[int]:
        """Turn one group after another, and go on from there where that is faster."""
        for group in groups:
            for other in self._picks.turned(at, group):
                if self._left <= 0 or self._best.predicted_seconds <= self._enough:
                    return at
                at = min(at, other, key=self._try)
        return at

    def _try(self, chosen: frozenset[int]) -> float:
        """Seconds of the best schedule of a set; infinite if there are no tries left for it."""
        if chosen not in self._seconds:
            self._seconds[chosen] = inf
            times: Times | None = boundary_times(self._case.trace, None)
            for _ in range(_ROUNDS):
                if times is None or self._left <= 0:
                    break
                self._left -= 1
                times = self._replay(chosen, times)
        return self._seconds[chosen]

    def _replay(self, chosen: frozenset[int], times: Times) -> Times | None:
        """Simulate the schedule for these times; give those of it where another is worth it."""
        case = self._case
        gaps = [self._swapping.gaps[index] for index in sorted(chosen)]
        moves = place(case.trace, gaps, times, self._picks.slack(chosen))
        plan = assemble(case, self._swapping.draft(self._planner, moves, _REASON))
        timeline = simulate(case.trace, case.hardware, plan)
        gained = timeline.seconds < self._seconds[chosen]
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
        return boundary_times(case.trace, timeline) if stalled and gained else None


def _groups(count: int) -> Iterator[frozenset[int]]:
    """Groups of neighbouring indices, ever smaller."""
    size = count
    while size > 1:
        size = (size + 1) // 2
        for first in range(0, count, size):
            yield frozenset(range(first, min(first + size, count)))


def _swaps(chosen: frozenset[int], count: int) -> Iterator[frozenset[int]]:
    """Pairs of a gap that is used and one near it that is not, the nearest first."""
    for distance in range(1, _NEAR + 1):
        for one in range(count - distance):
            if (one in chosen) != (one + distance in chosen):
                yield frozenset((one, one + distance))
