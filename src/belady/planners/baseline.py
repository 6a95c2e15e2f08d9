"""Move nothing: what plain PyTorch does, if that fits."""

from __future__ import annotations

from dataclasses import dataclass

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.planners.base import Draft, finish
from belady.planners.moves import Case
from belady.planners.traits import Traits


@dataclass(frozen=True, slots=True)
class Baseline:
    """Keep every value, with the algorithms observed."""

    name: str = "baseline"
    version: int = 1
    traits: Traits = Traits()

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`; every plan of this policy is exact."""
        draft = Draft(f"{self.name}/{self.version}", "kept: everything fits in device memory")
        return finish(Case(trace, hardware, budget, exact), draft)


BASELINE = Baseline()
