"""Copy what the links can hide, compute again what is cheap, keep what there is room for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.planners.base import finish
from belady.planners.lifetime import LIFETIME
from belady.planners.mix import Away, Mixer, Wish
from belady.planners.moves import Case
from belady.planners.spread import Times, boundary_times
from belady.simulate.engine import simulate

# Steps from recomputing nothing to recomputing all that can be.
_PARTS = 64
_STRETCHES = (inf, 2.0, 1.0)
_RESERVES = (0.0, 2.0, 6.0)
# Mixes that are tried, and ops that are planned in all of them: a large trace gets fewer.
_FEWEST, _MOST, _OPS = 8, 60, 100_000
# Share of the iteration below which stalls are not worth another try.
_NOTHING = 0.002


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The mix of copies and replays that simulates fastest.

    Copies that are hidden cost nothing, up to what a link carries between save and read; a replay
    costs its kernels. So values near the turn from forward to backward stay as far as there is
    room, early ones, whose gap is longest, are copied, and between them those with the cheapest
    replays are recomputed. How many that should be is found by simulation. It starts from the plan
    of `belady.planners.lifetime.Lifetime`, so it is never slower.
    """

    name: str = "hybrid"
    version: int = 1

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`; every plan of this policy is exact."""
        case = Case(trace, hardware, budget, exact)
        mixer = Mixer(case, f"{self.name}/{self.version}")
        best = finish(case, mixer.draft(_leanest(mixer)))
        try:
            copies = LIFETIME(trace, hardware, budget, exact=exact)
        except InfeasibleBudgetError:
            pass
        else:
            if copies.predicted_seconds < best.predicted_seconds:
                best = replace(copies, planner=best.planner)
        return _Search(case, mixer, best).run() if mixer.cost else best


class _Point(NamedTuple):
    """A mix by numbers: steps of what is recomputed, indices into stretches and reserves."""

    part: int
    stretch: int = 0
    reserve: int = 0


class _Search:
    """Tries mixes by simulation, from coarse to fine."""

    def __init__(self, case: Case, mixer: Mixer, best: Plan) -> None:
        self._case = case
        self._mixer = mixer
        self._best = best
        self._left = max(_FEWEST, min(_MOST, _OPS // max(1, len(case.trace.ops))))
        self._seconds: dict[Wish, float] = {}
        self._parts = _parts(case.trace, mixer)

    def run(self) -> Plan:
        """The fastest plan found."""
        at = self._fastest(_Point(part) for part in range(0, _PARTS + 1, _PARTS // 4))
        step = _PARTS // 8
        while step:
            sides = [at._replace(part=at.part + by) for by in (-step, step)]
            at = self._fastest([at, *(it for it in sides if 0 <= it.part <= _PARTS)])
            if step > 1:
                at = self._fastest([at, *(at._replace(stretch=i) for i in range(len(_STRETCHES)))])
                at = self._fastest([at, *(at._replace(reserve=i) for i in range(len(_RESERVES)))])
            step //= 2
        return self._best

    def _fastest(self, points: Iterable[_Point]) -> _Point:
        return min(points, key=self._try)

    def _try(self, point: _Point) -> float:
        wish = Wish(self._parts[point.part], _STRETCHES[point.stretch], _RESERVES[point.reserve])
        if wish not in self._seconds:
            times: Times | None = boundary_times(self._case.trace, None)
            self._seconds[wish] = inf
            # Replays and copies make compute later, which changes when copies are due.
            while times is not None and self._left > 0:
                self._left -= 1
                times = self._settle(wish, times)
        return self._seconds[wish]

    def _settle(self, wish: Wish, times: Times) -> Times | None:
        """Try a mix; give the boundary times that it leads to if it is the fastest by now."""
        case = self._case
        plan = self._mixer.make(wish, times)
        if plan is None:
            return None
        timeline = simulate(case.trace, case.hardware, plan)
        self._seconds[wish] = min(self._seconds[wish], timeline.seconds)
        if timeline.seconds >= self._best.predicted_seconds:
            return None
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


def _parts(trace: Trace, mixer: Mixer) -> list[frozenset[int]]:
    """More and more of what can be recomputed: cheapest first, of equals the last saved."""
    order = sorted(mixer.cost, key=lambda v: (mixer.cost[v], -trace.values[v].first_save, v))
    total = sum(mixer.nbytes[value] for value in order)
    parts, chosen, nbytes = [], list[int](), 0
    pending = iter(order)
    for part in range(_PARTS + 1):
        while nbytes < total * part // _PARTS:
            chosen.append(next(pending))
            nbytes += mixer.nbytes[chosen[-1]]
        parts.append(frozenset(chosen))
    return parts


def _leanest(mixer: Mixer) -> Away:
    """Of the plans that keep nothing, the one with the lowest peak."""
    every = frozenset(mixer.cost)
    wishes = [Wish(frozenset()), *(Wish(every, stretch) for stretch in _STRETCHES)]
    return max((mixer.away(wish) for wish in wishes), key=mixer.room)


HYBRID = Hybrid()
