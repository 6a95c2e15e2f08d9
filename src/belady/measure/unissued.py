"""An iteration that no host issues, since it was captured and is launched."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Assignment, Offload, Plan
from belady.ir.timeline import Lane, Span
from belady.ir.trace import Phase, Trace
from belady.simulate import simulate
from belady.simulate.reassigned import reassigned


def unissued(trace: Trace) -> Trace:
    """The trace with no host in it."""
    return replace(trace, ops=tuple(replace(op, host_seconds=0.0) for op in trace.ops))


def launching(hardware: HardwareProfile, beside_bytes: int) -> HardwareProfile:
    """The machine on which copies and replays are issued for nothing.

    Parameters
    ----------
    beside_bytes
        What others need that may not lie where launches write: it is left of every budget.
    """
    allocator = hardware.allocator
    allocator = replace(allocator, margin_bytes=allocator.margin_bytes + beside_bytes)
    links = tuple(replace(link, issue_s=0.0) for link in hardware.links)
    return replace(hardware, allocator=allocator, links=links, hook_s=0.0)


def in_time(trace: Trace, hardware: HardwareProfile, plan: Plan, boundaries: Sequence[int]) -> Plan:
    """The plan with copies out that would outlast forward issued in backward.

    A launch ends when all that was issued in it has ended: the loss would wait for copies that
    nothing waits for otherwise. What is half copied by then stays, and is waited for. All others
    are issued where they are predicted to begin, or before: one at a boundary, since several would
    go out in the order of the plan, which is that in which they come back.

    Parameters
    ----------
    boundaries
        Where they should be issued.
    """
    phases = [op.phase for op in trace.ops]
    if Phase.BACKWARD not in phases or Phase.FORWARD not in phases:
        return plan
    begins = phases.index(Phase.BACKWARD)
    spans = simulate(trace, hardware, plan).spans
    kernels = [it for it in spans if it.lane is Lane.COMPUTE and 0 <= it.op < len(phases)]
    ended = max((it.end_s for it in kernels if phases[it.op] is Phase.FORWARD), default=0.0)
    late = sorted((it for it in spans if _is_late(it, ended)), key=_start, reverse=True)
    later = [it for it in kernels if it.op >= begins]
    if not late or not later:
        return plan
    due = {
        it.value: later[max(0, bisect_right(later, it.start_s, key=_start) - 1)].op for it in late
    }
    issued = _apart(due, [begins, *(it for it in boundaries if it > begins)])
    if len({*issued.values()}) < len(issued):
        # Two kernels of one are better than a lane that has its copies in another order.
        issued = _apart(due, range(begins, len(phases)))

    def parted(it: Assignment) -> Assignment:
        move, boundary = it.decision, issued.get(it.value)
        if boundary is None or not isinstance(move, Offload) or move.free_at < begins:
            return it
        after = min(boundary, move.free_at) - 1
        return replace(it, decision=replace(move, copy_out_after=after))

    return reassigned(trace, hardware, plan, [parted(it) for it in plan.assignments]) or plan


def _apart(due: Mapping[int, int], allowed: Sequence[int]) -> dict[int, int]:
    """A place for each, the last one first: where it is due, or before; the first one for many."""
    found, before = dict[int, int](), len(allowed)
    for value, boundary in due.items():
        before = max(0, bisect_right(allowed, boundary, 0, before) - 1)
        found[value] = allowed[before]
    return found


def _is_late(span: Span, ended: float) -> bool:
    """Whether a copy out is less than half done at a moment."""
    return span.lane is Lane.COPY_OUT and span.start_s + span.end_s > 2 * ended


def _start(span: Span) -> float:
    return span.start_s
