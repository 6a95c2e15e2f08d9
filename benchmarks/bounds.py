"""What no plan can beat, with kernels as fast as a run shows them and no holes between blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from belady.errors import MissingExtraError
from belady.ir.plan import Budget
from belady.ir.run import Run
from belady.ir.trace import Source
from belady.measure.corrections import faster
from belady.simulate import bound
from belady.simulate.bound import Bound
from benchmarks.cases import Record

# Of the bound beside a row of ours, which is worked out while others wait: cuts in time, seconds of
# the solver, and ops up to which that is done in seconds.
_SAMPLES, _SOLVER_SECONDS, _PATIENT = 16, 10.0, 40_000


def bounded(run: Run, budget: Budget, **limits: Any) -> Bound:
    """The bound of a run's trace within ``budget``, without a margin for holes between blocks."""
    predicted = run.predicted.seconds
    measured = run.measured.iterations if run.measured else ()
    share = min(measured, default=predicted) / predicted if predicted else 1.0
    share = min(1.0, share)
    ops = (replace(op, host_seconds=share * op.host_seconds) for op in run.trace.ops)
    trace = replace(run.trace, ops=tuple(faster(op, share) for op in ops))
    allocator = replace(run.hardware.allocator, margin_fraction=0.0, margin_bytes=0)
    return bound(trace, replace(run.hardware, allocator=allocator), budget, **limits)


def bound_of_own(run: Run) -> Record:
    """Of captured graphs and of slices, what no plan of their trace can beat.

    That is ``own_bound_seconds``. The method ``bound`` is of hooks, eager kernels and no slices.
    """
    apart = run.trace.source is Source.GRAPH or "sections" in run.plan.numerics
    if not apart or len(run.trace.ops) > _PATIENT:
        return {}
    try:
        found = bounded(run, run.plan.budget, samples=_SAMPLES, solver_seconds=_SOLVER_SECONDS)
    except MissingExtraError:  # what was measured is told without SciPy
        return {}
    told = found.feasible and found.status in ("kept", "optimal")
    return {"own_bound_seconds": found.seconds} if told else {}
