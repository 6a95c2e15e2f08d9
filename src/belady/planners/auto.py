"""The default: nothing when everything fits, otherwise the policy that simulates fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.planners.base import Planner
from belady.planners.baseline import BASELINE
from belady.planners.hybrid import HYBRID
from belady.planners.lean import Lean
from belady.planners.lifetime import LIFETIME
from belady.planners.price import KEPT, price
from belady.planners.traits import Coordinated, Traits
from belady.planners.vdnn import VDNN_ALL, VDNN_CONV, VDNN_DYN
from belady.planners.workspace import as_run
from belady.simulate import simulate
from belady.simulate.blocks import excess

# Not the floor, from which the lifetime policy starts, nor that one, from which the hybrid does.
_CANDIDATES: tuple[Planner, ...] = (VDNN_CONV, VDNN_ALL, VDNN_DYN, HYBRID)
# The hybrid policy searches for seconds: not once more, unless nothing else will do.
_LEAN: tuple[Planner, ...] = (Lean(BASELINE), Lean(LIFETIME))
_LAST: tuple[Planner, ...] = (Lean(HYBRID),)


_TRAITS = Traits(
    recomputes=True,
    fills=True,
    slices_modules=True,
    slices_losses=True,
    spares_workspace=True,
    coordinated=Coordinated.AS_NEEDED,
)


@dataclass(frozen=True, slots=True)
class Auto:
    """`Baseline` when it fits; else the fastest of the other policies that does.

    One whose blocks torch's allocator cannot fit into the budget counts as slower.

    Where convolutions are known to do with less workspace, keeping everything and the lifetime
    policy are among them in that way too, and the hybrid policy where nothing else fits.
    Settings that can change a bit are used only if they fit more or take less time. The plan bears
    the name of the policy chosen, e.g. ``"auto:vdnn_conv/1"``, and its reasons.
    """

    name: str = "auto"
    version: int = 1
    traits: Traits = _TRAITS

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`."""
        refusals: list[InfeasibleBudgetError] = []

        def attempt(planner: Planner, exact: bool) -> Plan | None:
            try:
                return planner(trace, hardware, budget, exact=exact)
            except InfeasibleBudgetError as error:
                # A traceback keeps the frames of all callers, and with them the user's tensors.
                refusals.append(error.with_traceback(None))
                return None

        plans: list[tuple[Plan, Planner]] = []
        lean, last = (_LEAN, _LAST) if not exact and _has_a_choice(trace) else ((), ())
        for planners in ((BASELINE,), (*_CANDIDATES, *lean), last):
            made = [(attempt(planner, exact), planner) for planner in planners if not plans]
            plans += [(plan, planner) for plan, planner in made if plan is not None]
        if not plans:
            raise min(refusals, key=lambda refusal: refusal.smallest_bytes)
        best, planner = min(plans, key=lambda made: _price(made[0], trace, hardware))
        same = attempt(planner, exact=True) if best.numerics else None
        if same is not None and same.predicted_seconds <= _seconds(best, trace, hardware):
            best = same
        return replace(best, planner=f"{self.name}:{best.planner}")


def _has_a_choice(trace: Trace) -> bool:
    return any(op.algorithms for op in trace.ops)


def _price(plan: Plan, trace: Trace, hardware: HardwareProfile) -> float:
    return price(_seconds(plan, trace, hardware), excess(trace, plan, hardware.allocator), KEPT)


def _seconds(plan: Plan, trace: Trace, hardware: HardwareProfile) -> float:
    """Of an iteration as it runs: convolutions have one setting, also where a plan knows better."""
    runs = as_run(plan, trace)
    return plan.predicted_seconds if runs == plan else simulate(trace, hardware, runs).seconds


AUTO = Auto()
