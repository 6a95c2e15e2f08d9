"""What a picture needs of a Run: that its parts belong together."""

from __future__ import annotations

from collections.abc import Iterable

from belady.errors import DocumentError, PlanMismatchError
from belady.ir.plan import Encode, Offload, Plan
from belady.ir.run import Run
from belady.ir.timeline import Measured, Timeline

_LONGEST_S = 1e9


def require_drawable(run: Run) -> None:
    """Refuse a run whose parts do not belong together.

    Raises
    ------
    PlanMismatchError
        If the plan is for another trace.
    DocumentError
        If the plan, the prediction or the measurement names an op, value or boundary that the
        trace does not have, or a span that ends before it starts.
    """
    fingerprint = run.trace.fingerprint
    if run.plan.trace != fingerprint:
        raise PlanMismatchError(
            f"the plan of this run is for trace {run.plan.trace}, its trace is {fingerprint}"
        )
    ops, values = len(run.trace.ops), len(run.trace.values)
    _require_plan(run.plan, ops, values)
    if len(run.predicted.curve) not in (0, ops):
        found = len(run.predicted.curve)
        raise DocumentError(f"predicted.curve: {found} numbers for {ops} ops")
    _require_events("predicted", run.predicted, ops, values)
    if run.measured is not None:
        _require_events("measured", run.measured, ops, values)
        held = run.measured.held
        _require_within("measured.held.boundary", (item.boundary for item in held), 0, ops)
        _require_within("measured.held.seconds", (h.seconds for h in held), -_LONGEST_S, _LONGEST_S)


def _require_plan(plan: Plan, ops: int, values: int) -> None:
    _require_within("plan.assignments", plan.decisions, 0, values - 1)
    for value, decision in plan.decisions.items():
        where = f"plan, value {value}"
        if isinstance(decision, Offload):
            _require_within(f"{where}.copy_out_after", [decision.copy_out_after], -1, ops)
            late = (decision.free_at, decision.copy_in_at, decision.ready_by)
            _require_within(where, late, 0, ops)
        elif isinstance(decision, Encode):
            _require_within(where, (decision.encode_at, decision.decode_at), 0, ops)


def _require_events(name: str, side: Timeline | Measured, ops: int, values: int) -> None:
    for kind, events in (("spans", side.spans), ("stalls", side.stalls)):
        where = f"{name}.{kind}"
        _require_within(f"{where}.op", (event.op for event in events), -1, ops)
        _require_within(f"{where}.value", (event.value for event in events), -1, values - 1)
    for index, span in enumerate(side.spans):
        if not -_LONGEST_S <= span.start_s <= span.end_s <= _LONGEST_S:
            found = f"from {span.start_s} to {span.end_s} seconds"
            raise DocumentError(f"{name}.spans[{index}]: {found}, which cannot be drawn")
    _require_within(f"{name}.stalls.seconds", (s.seconds for s in side.stalls), 0, _LONGEST_S)
    starts = (stall.start_s for stall in side.stalls)
    _require_within(f"{name}.stalls.start_s", starts, -_LONGEST_S, _LONGEST_S)


def _require_within(path: str, numbers: Iterable[float], low: float, high: float) -> None:
    for number in numbers:
        if not low <= number <= high:
            raise DocumentError(f"{path}: {number} is not between {low:g} and {high:g}")
