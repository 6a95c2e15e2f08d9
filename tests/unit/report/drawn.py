"""Runs to draw: predicted ones, and one recorded event by event."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.plan import Budget
from belady.ir.run import Run
from belady.ir.timeline import Cause, Held, Lane, Measured, Span, Stall, TierPeak
from belady.ir.trace import Tier, Trace
from belady.planners import plan as make_plan
from belady.planners import smallest_budget
from belady.simulate import simulate
from tests.support.builder import OpSpec, build_trace
from tests.support.strategies import instances, machine, random_trace

MIB = 2**20
ALLOCATOR = Allocator(round_bytes=512, margin_fraction=0.0, margin_bytes=0)
GPU = machine("cuda", link_rate=5e9, disk=False, disk_rate=1e9, allocator=ALLOCATOR)
CPU = machine("cpu", link_rate=5e9, disk=True, disk_rate=1e9, allocator=ALLOCATOR)
SPECS = [OpSpec(nbytes=MIB, device_us=400, parameter_bytes=4096)] * 8
BUDGET = 64 * MIB


def run_of(
    trace: Trace | None = None,
    hardware: HardwareProfile = GPU,
    policy: str = "floor",
    budget: int = BUDGET,
) -> Run:
    trace = build_trace(SPECS, device=hardware.device) if trace is None else trace
    plan = make_plan(policy, trace, hardware, Budget(budget))
    return Run(trace, hardware, plan, simulate(trace, hardware, plan))


def staged() -> Run:
    """What goes to disk by way of pinned memory."""
    small = replace(ALLOCATOR, margin_bytes=0)
    hardware = machine("cuda", link_rate=5e9, disk=True, disk_rate=1e9, allocator=small)
    trace = build_trace(SPECS)
    plan = make_plan("floor", trace, hardware, Budget(BUDGET, host_bytes=2 * MIB))
    return Run(trace, hardware, plan, simulate(trace, hardware, plan))


def recorded(run: Run | None = None) -> Run:
    """A run whose copies, waits and bytes were all seen, in the ninth iteration, of 12 ms."""
    run = run or run_of()
    value, other = sorted(run.plan.decisions)[:2]
    spans = (
        Span(Lane.COPY_OUT, 0.001, 0.002, value=value),
        Span(Lane.COPY_OUT, 0.0015, 0.003, value=other),
        Span(Lane.COPY_IN, 0.006, 0.007, value=value),
        Span(Lane.COPY_IN, 0.007, 0.009, value=other),
    )
    stalls = (
        Stall(Cause.COPY_OUT, 4, other, 0.0005, 0.0025),
        Stall(Cause.COPY_IN, 12, value, 0.00025, 0.00675),
    )
    held = (Held(0, 0.0, MIB), Held(6, 0.004, 5 * MIB), Held(12, 0.008, 2 * MIB))
    peaks = (TierPeak(Tier.DEVICE, 6 * MIB),)
    seen = Measured(2, 0.01, (0.009, 0.011), peaks, numbers=(5, 6))
    seen = replace(seen, spans=spans, stalls=stalls, held=held, recorded=9, recorded_seconds=0.012)
    return replace(run, measured=seen)


def large_run() -> Run:
    """30,000 ops, every event measured."""
    trace = random_trace(1, 30_000)
    plan = make_plan("floor", trace, GPU, Budget(1 << 40))
    predicted = simulate(trace, GPU, plan)
    copies = tuple(s for s in predicted.spans if s.lane not in (Lane.HOST, Lane.COMPUTE))
    held = tuple(Held(op, 0.0, nbytes) for op, nbytes in enumerate(predicted.curve))
    peaks = (TierPeak(Tier.DEVICE, BUDGET),)
    seconds = predicted.seconds
    measured = Measured(
        2, seconds, (seconds,), peaks, spans=copies, stalls=predicted.stalls, held=held
    )
    return Run(trace, GPU, plan, predicted, measured)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Any trace on any machine, planned with all room or the least that will do."""
    trace, hardware = draw(instances(max_ops=8))
    policy = draw(st.sampled_from(("floor", "hybrid", "lifetime", "vdnn_all", "baseline")))
    budget = 1 << 60
    if draw(st.booleans()):
        budget = smallest_budget(policy, trace, hardware, Budget(budget))
    return run_of(trace, hardware, policy, budget)
