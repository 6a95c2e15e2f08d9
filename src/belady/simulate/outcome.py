"""What came of an iteration whose tasks have run: a Timeline."""

from __future__ import annotations

from belady.ir.curves import curve, tier_curve
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Plan, Recompute
from belady.ir.residency import intervals
from belady.ir.timeline import Cause, Lane, Moved, Span, Stall, TierPeak, Timeline
from belady.ir.trace import Tier, Trace
from belady.simulate.lanes import Task


def timeline_of(trace: Trace, hardware: HardwareProfile, plan: Plan, tasks: list[Task]) -> Timeline:
    """Timeline of ``tasks`` that have run."""
    elsewhere = intervals(trace, plan)
    held = curve(trace, plan, hardware.allocator, elsewhere)
    peak_op = max(range(len(held)), key=held.__getitem__, default=0)
    compute = [task for task in tasks if task.lane is Lane.COMPUTE]
    work = [task for task in tasks if task.cause is None]
    spans = [Span(t.lane, t.start, t.end, t.op, t.value) for t in work]
    spans.sort(key=lambda span: span.start_s)
    replayed = {v for v, decision in plan.decisions.items() if isinstance(decision, Recompute)}
    peaks = [TierPeak(Tier.DEVICE, max(held, default=0))]
    for tier in (Tier.HOST, Tier.DISK):
        nbytes = max(tier_curve(elsewhere, tier, len(trace.ops)), default=0)
        peaks.append(TierPeak(tier, nbytes))
    return Timeline(
        seconds=compute[-1].end if compute else 0.0,
        compute_seconds=sum(task.seconds for task in compute if task.value not in replayed),
        peaks=tuple(peaks),
        peak_op=peak_op,
        moved=_moved(tasks),
        stalls=_stalls(compute, serial=trace.device == "cpu"),
        curve=tuple(held),
        spans=tuple(spans),
        replay_seconds=sum(task.seconds for task in compute if task.value in replayed),
    )


def _moved(tasks: list[Task]) -> tuple[Moved, ...]:
    sizes: dict[Lane, list[int]] = {}
    for task in tasks:
        if task.link is not None:
            sizes.setdefault(task.lane, []).append(task.nbytes)
    return tuple(Moved(lane, sum(sizes[lane]), len(sizes[lane])) for lane in Lane if lane in sizes)


def _stalls(compute: list[Task], *, serial: bool) -> tuple[Stall, ...]:
    """Every idle moment of the compute lane, charged to one cause."""
    stalls: list[Stall] = []
    waits: list[Task] = []
    idle_since = 0.0
    for task in compute:
        if task.cause is not None:
            waits.append(task)
            continue
        issued = task.after[0].end if task.after else 0.0
        reached = idle_since if serial else max(idle_since, issued)
        late = _late(waits, reached, task.op)
        if serial:
            # On one thread the host goes on only when the copies are there.
            since = waits[-1].end if waits else reached
            host = task.start - since
        else:
            since, host = idle_since, max(0.0, issued - idle_since)
        if host > 0:
            stalls.append(Stall(Cause.HOST, task.op, -1, host, since))
        stalls += late
        waits, idle_since = [], task.end
    return (*stalls, *_late(waits, idle_since, -1))


def _late(waits: list[Task], reached: float, op: int) -> list[Stall]:
    """Stalls of the waits that ended after ``reached``."""
    late: list[Stall] = []
    for wait in waits:
        if wait.cause is not None and wait.end > reached:
            late.append(Stall(wait.cause, op, wait.value, wait.end - reached, reached))
            reached = wait.end
    return late
