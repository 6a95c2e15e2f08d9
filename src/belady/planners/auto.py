"""The default: nothing when everything fits, otherwise the policy that simulates fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.planners.base import Planner
from belady.planners.baseline import BASELINE
from belady.planners.floor import FLOOR
from belady.planners.vdnn import VDNN_ALL, VDNN_CONV, VDNN_DYN

_CANDIDATES: tuple[Planner, ...] = (VDNN_CONV, VDNN_ALL, VDNN_DYN, FLOOR)


@dataclass(frozen=True, slots=True)
class Auto:
    """`Baseline` when it fits; else the fastest of vDNN's policies and `Floor` that does.

    Of equally fast plans the one that changes no numerics is taken. The plan bears the name of
    the policy chosen, e.g. ``"auto:vdnn_conv/1"``, and its reasons.
    """

    name: str = "auto"
    version: int = 1

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`."""
        refusals: list[InfeasibleBudgetError] = []
        try:
            return self._named(BASELINE(trace, hardware, budget, exact=exact))
        except InfeasibleBudgetError as error:
            refusals.append(error)
        plans: list[Plan] = []
        for planner in _CANDIDATES:
            try:
                plans.append(planner(trace, hardware, budget, exact=exact))
            except InfeasibleBudgetError as error:
                refusals.append(error)
        if not plans:
            raise min(refusals, key=lambda refusal: refusal.smallest_bytes)
        return self._named(min(plans, key=lambda it: (it.predicted_seconds, bool(it.numerics))))

    def _named(self, plan: Plan) -> Plan:
        return replace(plan, planner=f"{self.name}:{plan.planner}")


AUTO = Auto()
