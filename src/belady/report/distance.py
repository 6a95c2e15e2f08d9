"""How far a run's plan is from what no plan can beat; worked out only when somebody asks.

The linear program behind `belady.simulate.bound` takes longer than the rest of a report where it
cuts time finely. A few cuts give almost the same figure, so a report makes few, and none where a
trace is so long that its reader would wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from belady.errors import MissingExtraError
from belady.ir.plan import Managed, Workspace
from belady.ir.run import Run
from belady.simulate import bound
from belady.units import format_seconds

_SAMPLES = 8
_SOLVER_SECONDS = 2.0
# Ops of which the bound takes two to three seconds, and less than one.
PATIENT = 40_000
HASTY = 10_000
# Predictions are sums of many small numbers: what is nearer than this is as fast.
_SAME = 5e-4


@dataclass(frozen=True, slots=True)
class Distance:
    """What no plan can beat, beside a plan.

    Attributes
    ----------
    seconds
        No plan within the budget takes less; None where that cannot be said.
    above
        Fraction by which the plan is predicted to take more; 0 without ``seconds``.
    unknown
        Why it cannot be said; empty where it can.
    """

    seconds: float | None
    above: float = 0.0
    unknown: str = ""

    @property
    def sentence(self) -> str:
        """All of it in words."""
        if self.seconds is None:
            return f"How much faster a plan could be is not said: {self.unknown}."
        than = f"No plan can be faster than {format_seconds(self.seconds)} in this budget (bound)"
        if self.above < _SAME:
            return f"{than}: this one is predicted to be as fast."
        return f"{than}: this one is predicted {self.above:.1%} above it."


def distance(run: Run, seconds: float | None = None, longest: int = PATIENT) -> Distance:
    """How far the plan of ``run`` is from the bound.

    Parameters
    ----------
    seconds
        What the plan is predicted to take; by default what the run says.
    longest
        Most ops for which the bound is worked out.
    """
    unknown = _beyond(run, longest)
    if unknown:
        return Distance(None, unknown=unknown)
    budget = run.plan.budget
    try:
        found = bound(
            run.trace, run.hardware, budget, samples=_SAMPLES, solver_seconds=_SOLVER_SECONDS
        )
    except MissingExtraError as error:
        return Distance(None, unknown=str(error))
    if not found.feasible:
        return Distance(None, unknown="no plan keeps to this budget and its margin")
    if found.status not in ("kept", "optimal"):
        return Distance(None, unknown="the solver did not come to an end in time")
    above = found.gap(run.predicted.seconds if seconds is None else seconds)
    if above < -_SAME:
        return Distance(None, unknown="the run was predicted by other means than the bound")
    return Distance(found.seconds, max(above, 0.0))


def _beyond(run: Run, longest: int) -> str:
    """Why the bound cannot be asked about this run; empty where it can."""
    plan, ops = run.plan, len(run.trace.ops)
    if ops > longest:
        return f"the bound takes long for {ops} ops, and is left out here above {longest}"
    if any(isinstance(decision, Managed) for decision in plan.decisions.values()):
        return "the bound does not know managed memory"
    if plan.workspace is Workspace.MEMORY or plan.layer_algorithms:
        return "the bound knows convolutions with the workspace that was observed alone"
    return ""
