"""A run small enough to work out by hand: a page is copied in a second.

Value 0 is three pages, made by op 0 and read by op 3; op 2 takes two pages of scratch. It goes to
the host while op 1 runs, and comes back only when it is read: compute waits three seconds.

    op 0 | op 1    | op 2 | waits   | op 3
    4 s  | 3 s     | 1 s  | 3 s     | 1 s      12 s, and 9 s with everything kept
"""

from __future__ import annotations

from dataclasses import replace

from belady.ir.hardware import Allocator, Capacity, HardwareProfile, Link
from belady.ir.plan import Assignment, Budget, Decision, Offload, Plan
from belady.ir.run import Run
from belady.ir.trace import Tier, Trace
from belady.simulate import simulate
from tests.unit.simulate.cases import trace_of

PAGE = 4096
TO_HOST = Offload(Tier.HOST, 0, 2, 3, 3)
# A quarter of the peak and a hundred bytes come on top.
ALLOCATOR = Allocator(1, 0.25, 100)


def a_trace(*, pages: int = 3, scratch: int = 2, replayable: bool = True) -> Trace:
    trace = trace_of([4, 3, 1, 1], [(pages * PAGE, 0, 3)])
    ops = list(trace.ops)
    ops[0] = replace(ops[0], writes=(0,), replayable=replayable, module="stem")
    ops[2] = replace(ops[2], workspace_bytes=scratch * PAGE)
    (value,) = trace.values
    (save,) = value.saves
    named = replace(value, saves=(replace(save, module="stem"),))
    return replace(trace, ops=tuple(ops), values=(named,))


def gpu(*, disk_pages_per_s: float = 0.0) -> HardwareProfile:
    """DEVICE and HOST, a page per second between them; and DISK where it has a speed."""
    ends = [(Tier.DEVICE, Tier.HOST, 1.0), (Tier.HOST, Tier.DEVICE, 1.0)]
    capacities = [Capacity(Tier.DEVICE, 1 << 30), Capacity(Tier.HOST, 1 << 30)]
    if disk_pages_per_s:
        capacities.append(Capacity(Tier.DISK, 1 << 30))
        ends += [(Tier.HOST, Tier.DISK, disk_pages_per_s), (Tier.DISK, Tier.HOST, disk_pages_per_s)]
    links = tuple(
        Link(source, target, ((PAGE, speed * PAGE),), speed * PAGE, 0.0, f"{source} to {target}")
        for source, target, speed in ends
    )
    return HardwareProfile("by hand", "cuda", tuple(capacities), links, ALLOCATOR)


def run_of(
    trace: Trace,
    decision: Decision = TO_HOST,
    *,
    hardware: HardwareProfile | None = None,
    budget: int = ALLOCATOR.budget_for(3 * PAGE),
) -> Run:
    hardware = hardware or gpu()
    assigned = (Assignment(0, decision, "moved: says so"),)
    plan = Plan(trace.fingerprint, "by hand/1", Budget(budget), assigned)
    return Run(trace, hardware, plan, simulate(trace, hardware, plan))
