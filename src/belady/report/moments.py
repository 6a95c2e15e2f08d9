"""What a picture of a Run needs and its Timeline does not say: where each stall lies in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from belady.errors import DocumentError, PlanMismatchError
from belady.ir.plan import Encode, Offload, Plan
from belady.ir.run import Run
from belady.ir.timeline import Cause, Lane, Measured, Span, Stall, Timeline

_LONGEST_S = 1e9
# Differences of moments in one iteration agree within this.
_SAME_S = 1e-9
# The lane that ends on the device comes first; the other where there is no such lane (a CPU).
_WAITED_FOR = {
    Cause.COPY_OUT: (Lane.COPY_OUT, Lane.DISK_WRITE),
    Cause.COPY_IN: (Lane.COPY_IN, Lane.DISK_READ),
}


class Wait(NamedTuple):
    """A stall and when it was."""

    stall: Stall
    start_s: float
    end_s: float


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


def waits(spans: Sequence[Span], stalls: Iterable[Stall], *, serial: bool) -> list[Wait]:
    """Say when each stall was; one that no span gives a time is left out.

    A wait for a copy is where compute was idle for just as long around that op, and else ends
    when the copy does. A wait for the host lies where compute was idle before the op: right before
    it where host and compute are one thread (``serial``), else right after the work before, since
    it is the host that comes first then.
    """
    copied: dict[tuple[Lane, int], float] = {}
    for span in spans:
        if span.value >= 0:
            key = span.lane, span.value
            copied[key] = max(span.end_s, copied.get(key, span.end_s))
    work = sorted((s for s in spans if s.lane is Lane.COMPUTE), key=attrgetter("start_s"))
    work.insert(0, Span(Lane.COMPUTE, 0.0, 0.0))
    idle = {now.op: (before.end_s, now.start_s) for before, now in pairwise(work) if now.value < 0}
    gaps = _gaps(work)
    found = []
    for stall in stalls:
        end: float | None = None
        if stall.cause is not Cause.HOST:
            keys = [(lane, stall.value) for lane in _WAITED_FOR[stall.cause]]
            end = next((copied[key] for key in keys if key in copied), None)
            length = round(stall.seconds / _SAME_S)
            exact = (gaps.get((stall.op, length + off)) for off in (0, -1, 1))
            if ends := next(filter(None, exact), None):
                end = ends.popleft()
        elif stall.op in idle:
            before, start = idle[stall.op]
            end = start if serial else before + stall.seconds
        if end is not None:
            found.append(Wait(stall, end - stall.seconds, end))
    return found


def _gaps(work: Sequence[Span]) -> dict[tuple[int, int], deque[float]]:
    """When compute ceased to be idle, by the op before or after and by how long it had been."""
    found: dict[tuple[int, int], deque[float]] = {}
    for before, after in pairwise(work):
        length = round((after.start_s - before.end_s) / _SAME_S)
        for op in {before.op, after.op} if length > 0 else ():
            found.setdefault((op, length), deque()).append(after.start_s)
    return found


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


def _require_within(path: str, numbers: Iterable[float], low: float, high: float) -> None:
    for number in numbers:
        if not low <= number <= high:
            raise DocumentError(f"{path}: {number} is not between {low:g} and {high:g}")
