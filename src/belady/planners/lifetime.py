"""Move what must move, and spread its copies over the time between its uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Budget, Offload, Plan
from belady.ir.trace import Trace
from belady.planners.base import Draft, assemble, finish
from belady.planners.floor import FLOOR
from belady.planners.moves import Case
from belady.planners.spread import Spread, boundary_times, slack_of
from belady.planners.traits import Traits
from belady.simulate.engine import simulate

# Bytes left for copies under way rather than for kept values, in multiples of the largest move.
_RESERVES = (0.0, 2.0, 6.0)
# Copies make compute wait, which changes when copies are due: times are settled in rounds.
_ROUNDS = 2
# Share of the iteration below which stalls are not worth another try.
_NOTHING = 0.002


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Belady's rule on lifetimes: what is needed again last leaves first.

    It starts from `belady.planners.floor.Floor` and gives back the memory that the budget leaves:
    first to values whose gap between save and read is nearest to the turn from forward to
    backward, which stay; then to copies under way, so that a copy-out ends before its bytes must
    be gone and a copy-in begins early enough. How much of each is tried in simulation.
    """

    name: str = "lifetime"
    version: int = 5
    traits: Traits = Traits(fills=True)

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`; every plan of this policy is exact."""
        case = Case(trace, hardware, budget, exact)
        floor = FLOOR.draft(case)
        least = replace(floor, planner=f"{self.name}/{self.version}")
        best = finish(case, least)
        slack = slack_of(case, assemble(case, least))
        if not least.moves or slack.min(initial=0) < 0:
            return best
        for reserve in _RESERVES:
            times = boundary_times(trace, None)
            for _ in range(_ROUNDS):
                spread = Spread(case, floor.moves, times, slack)
                spread.keep(reserve)
                spread.widen()
                plan = _spread_plan(case, least, spread.moves)
                timeline = simulate(trace, hardware, plan)
                if timeline.seconds < best.predicted_seconds and _fits(case, plan):
                    best = replace(plan, predicted_seconds=timeline.seconds)
                if timeline.stall_seconds <= _NOTHING * timeline.seconds:
                    return _judged(case, best)
                times = boundary_times(trace, timeline)
        return _judged(case, best)


def _spread_plan(case: Case, least: Draft, moves: Mapping[int, Offload]) -> Plan:
    reasons = dict.fromkeys(moves, "moved: the budget has no room for it meanwhile")
    kept = "kept: the budget has room for it between save and read"
    return assemble(case, replace(least, moves=moves, reasons=reasons, kept=kept))


def _fits(case: Case, plan: Plan) -> bool:
    return check(case.trace, case.hardware, plan, case.budget).ok


def _judged(case: Case, plan: Plan) -> Plan:
    peak = check(case.trace, case.hardware, plan, case.budget).peak_bytes
    return replace(plan, predicted_peak_bytes=peak)


LIFETIME = Lifetime()
