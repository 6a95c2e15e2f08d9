"""Move all that may move, for as long as it may: the least memory that offloading reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from belady.ir.curves import curve
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.planners.base import Draft, assemble, finish
from belady.planners.due import schedule
from belady.planners.moves import Case, movable, offloads, tier_for
from belady.planners.traits import Traits


@dataclass(frozen=True, slots=True)
class Floor:
    """Copy out at the save, free at the next anchor, bring back only when backward reads.

    It is the plan of the first real iteration, when nothing is known of times: nothing is hidden
    on purpose, and every value that returns is waited for.
    """

    name: str = "floor"
    version: int = 1
    traits: Traits = Traits()

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`; every plan of this policy is exact."""
        case = Case(trace, hardware, budget, exact)
        return finish(case, self.draft(case))

    def draft(self, case: Case) -> Draft:
        """The choices before they are judged, for policies that start from the floor."""
        trace = case.trace
        values = movable(trace)
        schedules = {index: schedule(trace, index, None) for index in values}
        return Draft(
            planner=f"{self.name}/{self.version}",
            kept="kept: it may not move",
            reasons=dict.fromkeys(schedules, "moved: the floor moves all that may move"),
            moves=offloads(trace, tier_for(case, values), schedules),
        )


FLOOR = Floor()


def held_by_floor(trace: Trace, hardware: HardwareProfile, budget: Budget) -> Sequence[int]:
    """Device bytes held during each op where all is moved that may move."""
    case = Case(trace, hardware, budget)
    return curve(trace, assemble(case, FLOOR.draft(case)), hardware.allocator)
