"""Copy what the links can hide, compute again what is cheap, keep what there is room for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

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
from belady.simulate.blocks import excess
from belady.simulate.engine import iteration_seconds, simulate

# Steps from recomputing nothing to recomputing all that can be.
_PARTS = 64
_STRETCHES = (inf, 2.0, 1.0)
_RESERVES = (0.0, 2.0, 6.0)
_REACHES = (0.0, 8.0, 32.0, 128.0, inf)
# Mixes that are tried, and ops that are planned in all of them: a large trace gets fewer.
_FEWEST, _MOST, _OPS = 8, 120, 100_000
# How fast a mix whose blocks do not fit seems slower, the more they lack.
_STEEP = 4
# Share of the iteration below which stalls are not worth another try.
_NOTHING = 0.002


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The mix of copies and replays that simulates fastest.

    Copies that are hidden cost nothing, up to what a link carries between save and read; a replay
    costs its kernels. So values near the turn from forward to backward stay as far as there is
    room, early ones, whose gap is longest, are copied, and between them those with the cheapest
    replays are recomputed. How many that should be is found by simulation. It starts from the plan
    of `belady.planners.lifetime.Lifetime`, so it is never slower where torch's blocks fit into one
    another (`belady.simulate.blocks`): a mix whose blocks do not counts as slower.
    """

    name: str = "hybrid"
    version: int = 3
    recomputes: bool = True

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


class _Search:
    """Tries mixes by simulation: how many replays, then which, from coarse to fine."""

    def __init__(self, case: Case, mixer: Mixer, best: Plan) -> None:
        self._case = case
        self._mixer = mixer
        # The fastest so far, and that of which torch's blocks fit into one another.
        self._best = best
        self._fits: Plan | None = best if self._excess(best) <= 0 else None
        self._left = max(_FEWEST, min(_MOST, _OPS // max(1, len(case.trace.ops))))
        self._seconds: dict[Wish, float] = {}

    def run(self) -> Plan:
        """The fastest plan found."""
        parts = _parts(self._case.trace, self._mixer)
        some = parts[:: _PARTS // 4]
        at = self._fastest(Wish(values) for values in some)
        at = self._fastest(replace(at, stretch=stretch) for stretch in _STRETCHES)
        at = self._fastest(replace(at, reach=reach) for reach in _REACHES)
        at = self._fastest(
            replace(at, reserve=reserve, values=values) for reserve in _RESERVES for values in some
        )
        step = _PARTS // 8
        while step:
            here = parts.index(at.values)
            sides = [parts[by] for by in (here - step, here + step) if 0 <= by <= _PARTS]
            at = self._fastest([at, *(replace(at, values=values) for values in sides)])
            step //= 2
        at = self._fastest(replace(at, stretch=stretch) for stretch in _STRETCHES)
        at = self._fastest(replace(at, reach=reach) for reach in _REACHES)
        self._exchange(at)
        if self._fits is None:
            return self._best
        # What is simulated is not that exact that a little more would be worth any price.
        price = _priced(self._best.predicted_seconds, self._excess(self._best))
        return self._fits if self._fits.predicted_seconds <= price else self._best

    def _exchange(self, at: Wish) -> None:
        """Turn copies into replays and back, by fewer and fewer neighbours in time at once."""
        values = self._case.trace.values
        order = sorted(self._mixer.cost, key=lambda v: (values[v].first_save, v))
        size = len(order)
        while size > 1 and self._left > 0:
            size = (size + 1) // 2
            for first in range(0, len(order), size):
                turned = at.values ^ frozenset(order[first : first + size])
                at = self._fastest([at, replace(at, values=turned)])

    def _fastest(self, wishes: Iterable[Wish]) -> Wish:
        return min(wishes, key=self._try)

    def _try(self, wish: Wish) -> float:
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
        seconds = iteration_seconds(case.trace, case.hardware, plan)
        if self._fits is not None and seconds >= self._fits.predicted_seconds:
            self._note(wish, seconds)
            return None
        verdict = check(case.trace, case.hardware, plan, case.budget)
        if not verdict.ok:
            return None
        timeline = simulate(case.trace, case.hardware, plan)
        seconds = timeline.seconds
        plan = replace(plan, predicted_peak_bytes=verdict.peak_bytes, predicted_seconds=seconds)
        faster = seconds < self._best.predicted_seconds
        if faster:
            self._best = plan
        over = self._excess(plan)
        self._note(wish, _priced(seconds, over))
        if over <= 0:
            self._fits = plan
        elif not faster:
            return None
        stalled = timeline.stall_seconds > _NOTHING * timeline.seconds
        return boundary_times(case.trace, timeline) if stalled else None

    def _note(self, wish: Wish, seconds: float) -> None:
        self._seconds[wish] = min(self._seconds[wish], seconds)

    def _excess(self, plan: Plan) -> float:
        return excess(self._case.trace, plan, self._case.hardware.allocator)


def _priced(seconds: float, over: float) -> float:
    """What a mix counts as, whose blocks lack a part of the budget: near ones may lie better."""
    return seconds * (1 + max(0.0, over)) ** _STEEP


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
