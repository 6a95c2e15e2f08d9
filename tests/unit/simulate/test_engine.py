from __future__ import annotations

from dataclasses import replace

import pytest

from belady.errors import PlanMismatchError, TierError
from belady.ir.hardware import Allocator, HardwareProfile, Link, ManagedLinks
from belady.ir.plan import (
    Assignment,
    Budget,
    Encode,
    Keep,
    Managed,
    Offload,
    OrderEdit,
    Plan,
)
from belady.ir.timeline import Cause, Lane, Moved, Stall, Timeline
from belady.ir.trace import Source, Tier
from belady.simulate import simulate
from tests.support import strategies
from tests.unit.simulate.cases import cpu, gpu, link, machine, plan_of, trace_of


def spans(timeline: Timeline, lane: Lane) -> list[tuple[float, float]]:
    return [(s.start_s, s.end_s) for s in timeline.spans if s.lane is lane]


def test_ops_run_one_after_the_other() -> None:
    trace = trace_of([1, 2, 3])
    timeline = simulate(trace, gpu(), plan_of(trace))
    assert timeline.seconds == timeline.compute_seconds == 6
    assert spans(timeline, Lane.COMPUTE) == [(0, 1), (1, 3), (3, 6)]
    assert not timeline.stalls
    assert not timeline.moved


def test_an_iteration_without_ops_takes_no_time() -> None:
    trace = trace_of([])
    timeline = simulate(trace, gpu(), plan_of(trace))
    assert (timeline.seconds, timeline.peak(Tier.DEVICE), timeline.curve) == (0.0, 0, ())


def test_compute_waits_for_a_slow_host() -> None:
    trace = trace_of([1, 1, 4, 1], host_s=2)
    timeline = simulate(trace, gpu(), plan_of(trace))
    assert spans(timeline, Lane.COMPUTE) == [(2, 3), (4, 5), (6, 10), (10, 11)]
    assert timeline.stalls == tuple(
        Stall(Cause.HOST, op, -1, s, at) for op, s, at in ((0, 2, 0), (1, 1, 3), (2, 1, 5))
    )
    assert timeline.stall_seconds == 0


def test_on_a_cpu_host_and_compute_take_turns() -> None:
    trace = trace_of([1, 4], host_s=2, device="cpu")
    timeline = simulate(trace, cpu(), plan_of(trace))
    assert spans(timeline, Lane.HOST) == [(0, 2), (3, 5)]
    assert spans(timeline, Lane.COMPUTE) == [(2, 3), (5, 9)]
    assert [(stall.start_s, stall.end_s) for stall in timeline.stalls] == [(0, 2), (3, 5)]


def test_copies_hide_behind_compute() -> None:
    trace = trace_of([1, 5, 5, 1], [(3, 0, 3)])
    timeline = simulate(trace, gpu(), plan_of(trace, Offload(Tier.HOST, 0, 2, 2, 3)))
    assert timeline.seconds == 12
    assert spans(timeline, Lane.COPY_OUT) == [(1, 4)]
    assert spans(timeline, Lane.COPY_IN) == [(6, 9)]
    assert timeline.moved == (Moved(Lane.COPY_OUT, 3, 1), Moved(Lane.COPY_IN, 3, 1))
    assert timeline.peak(Tier.HOST) == 3
    assert not timeline.stalls


def test_compute_waits_for_the_copy_out_where_bytes_are_freed() -> None:
    trace = trace_of([1, 1, 5, 1], [(3, 0, 3)])
    timeline = simulate(trace, gpu(), plan_of(trace, Offload(Tier.HOST, 0, 2, 2, 3)))
    assert timeline.stalls == (Stall(Cause.COPY_OUT, 2, 0, 2, 2),)
    assert timeline.seconds == 10


def test_copy_in_takes_its_bytes_in_stream_order() -> None:
    # The host is far ahead, but the bytes are free only when compute has passed boundary 3.
    trace = trace_of([1, 5, 5, 1, 1], [(3, 0, 4)])
    timeline = simulate(trace, gpu(), plan_of(trace, Offload(Tier.HOST, 0, 1, 3, 4)))
    assert spans(timeline, Lane.COPY_IN) == [(14, 17)]
    assert timeline.stalls == (
        Stall(Cause.COPY_OUT, 1, 0, 3, 1),
        Stall(Cause.COPY_IN, 4, 0, 2, 15),
    )


def test_copy_in_waits_for_bytes_that_another_copy_out_frees() -> None:
    trace = trace_of([1, 1, 1, 9, 1, 1], [(3, 0, 4), (6, 1, 5)])
    first, second = Offload(Tier.HOST, 0, 2, 3, 4), Offload(Tier.HOST, 1, 3, 4, 5)
    timeline = simulate(trace, gpu(), plan_of(trace, first, second))
    assert spans(timeline, Lane.COPY_OUT) == [(1, 4), (4, 10)]
    assert spans(timeline, Lane.COPY_IN)[0] == (10, 13)


def test_a_copy_is_charged_with_what_it_adds_to_the_hosts_delay() -> None:
    trace = trace_of([1, 1, 1], [(4, 0, 2)], host_s=3)
    timeline = simulate(trace, gpu(), plan_of(trace, Offload(Tier.HOST, 0, 1, 2, 2)))
    # Copy out 4 to 8, so op 1 runs at 8 to 9 though issued at 6; copy in 9 to 13.
    assert timeline.stalls == (
        Stall(Cause.HOST, 0, -1, 3, 0),
        Stall(Cause.HOST, 1, -1, 2, 4),
        Stall(Cause.COPY_OUT, 1, 0, 2, 6),
        Stall(Cause.COPY_IN, 2, 0, 4, 9),
    )
    assert timeline.seconds == 14


def test_a_copy_slows_down_while_the_other_direction_is_busy() -> None:
    trace = trace_of([1, 4, 1, 20, 1], [(2, 0, 4), (8, 1, 4)])
    plan = plan_of(trace, Offload(Tier.HOST, 0, 2, 3, 4), Offload(Tier.HOST, 1, 4, 4, 4))
    timeline = simulate(trace, gpu(duplex=0.5), plan)
    # Out 1 runs alone from 5 to 6, then shares: 2 bytes in take 4 s, in which it moves 2.
    assert spans(timeline, Lane.COPY_IN)[0] == (6, 10)
    assert spans(timeline, Lane.COPY_OUT)[1] == (5, 15)


def test_paths_of_their_own_are_not_shared() -> None:
    trace = trace_of([1, 4, 1, 20, 1], [(2, 0, 4), (8, 1, 4)])
    plan = plan_of(trace, Offload(Tier.HOST, 0, 2, 3, 4), Offload(Tier.HOST, 1, 4, 4, 4))
    apart = machine(
        link(Tier.DEVICE, Tier.HOST, path="out", duplex=0.5),
        link(Tier.HOST, Tier.DEVICE, path="in", duplex=0.5),
    )
    timeline = simulate(trace, apart, plan)
    assert spans(timeline, Lane.COPY_IN)[0] == (6, 8)
    assert spans(timeline, Lane.COPY_OUT)[1] == (5, 13)


def test_disk_is_reached_through_pinned_memory() -> None:
    trace = trace_of([1, 10, 10, 1], [(3, 0, 3)])
    timeline = simulate(trace, gpu(), plan_of(trace, Offload(Tier.DISK, 0, 1, 2, 3)))
    assert spans(timeline, Lane.COPY_OUT) == [(1, 4)]
    assert spans(timeline, Lane.DISK_WRITE) == [(4, 7)]
    # Freeing waits for the device side alone; reading goes on without the compute stream.
    assert timeline.stalls == (Stall(Cause.COPY_OUT, 1, 0, 3, 1),)
    assert spans(timeline, Lane.DISK_READ) == [(7, 10)]
    assert spans(timeline, Lane.COPY_IN) == [(14, 17)]
    assert timeline.peak(Tier.DISK) == 3


def test_on_a_cpu_disk_is_next_to_the_device_and_waits_block_the_host() -> None:
    trace = trace_of([1, 1, 1], [(4, 0, 2)], host_s=1, device="cpu")
    timeline = simulate(trace, cpu(), plan_of(trace, Offload(Tier.DISK, 0, 1, 2, 2)))
    assert spans(timeline, Lane.DISK_WRITE) == [(2, 6)]
    assert spans(timeline, Lane.HOST) == [(0, 1), (6, 7), (12, 13)]
    assert spans(timeline, Lane.DISK_READ) == [(8, 12)]
    # The host goes on after each wait, and only then does compute.
    assert set(timeline.stalls) == {
        Stall(Cause.HOST, 0, -1, 1, 0),
        Stall(Cause.COPY_OUT, 1, 0, 4, 2),
        Stall(Cause.HOST, 1, -1, 1, 6),
        Stall(Cause.COPY_IN, 2, 0, 4, 8),
        Stall(Cause.HOST, 2, -1, 1, 12),
    }
    assert timeline.stall_seconds == 8
    assert timeline.seconds == 14


def test_a_slow_host_issues_copies_as_well() -> None:
    out = Link(Tier.DEVICE, Tier.HOST, ((1, 1.0),), 1.0, 0.0, "out", issue_s=3)
    back = Link(Tier.HOST, Tier.DEVICE, ((1, 1.0),), 1.0, 0.0, "back", issue_s=2)
    trace = trace_of([1, 1, 1, 1], [(1, 0, 3)], host_s=1)
    plan = plan_of(trace, Offload(Tier.HOST, 0, 1, 2, 3))
    timeline = simulate(trace, machine(out, back), plan)
    assert spans(timeline, Lane.HOST) == [(0, 1), (1, 4), (4, 5), (5, 7), (7, 8), (8, 9)]
    assert spans(timeline, Lane.COPY_OUT) == [(4, 5)]
    assert spans(timeline, Lane.COPY_IN) == [(7, 8)]
    assert timeline.seconds == 10


def test_hooks_of_a_value_that_is_moved_take_the_host_time_when_it_goes() -> None:
    graph = trace_of([1, 1, 1, 1], [(1, 0, 3)], host_s=1)
    trace = replace(graph, source=Source.EAGER)
    machine = replace(gpu(), hook_s=3)
    moved = Offload(Tier.HOST, 0, 1, 2, 3)
    timeline = simulate(trace, machine, plan_of(trace, moved))
    assert spans(timeline, Lane.HOST) == [(0, 1), (1, 4), (4, 5), (5, 6), (6, 7)]
    packed = simulate(trace, machine, plan_of(trace, Encode("uint8", 1, 1, 3)))
    assert [end - start for start, end in spans(packed, Lane.HOST)] == [1, 3, 1, 1, 1]
    # None are on where all is kept, and in a graph.
    for it, plan in ((trace, plan_of(trace)), (graph, plan_of(graph, moved))):
        assert spans(simulate(it, machine, plan), Lane.HOST) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_a_wait_at_the_end_has_no_op() -> None:
    trace = trace_of([1, 1], [(4, 0, 1)])
    trace = replace(trace, anchors=(2,))
    timeline = simulate(trace, gpu(), plan_of(trace, Offload(Tier.HOST, 0, 1, 1, 1)))
    assert timeline.stalls == (
        Stall(Cause.COPY_OUT, -1, 0, 4, 2),
        Stall(Cause.COPY_IN, -1, 0, 4, 6),
    )
    assert timeline.seconds == 10


def test_codecs_take_the_bandwidth_of_device_memory() -> None:
    trace = trace_of([1, 1, 1], [(4, 0, 2)])
    plan = plan_of(trace, Encode("uint8", 1, 1, 2))
    fast = machine(link(Tier.DEVICE, Tier.DEVICE, path="hbm"))
    assert simulate(trace, fast, plan).seconds == simulate(trace, fast, plan).compute_seconds == 13
    assert simulate(trace, gpu(), plan).seconds == 3


def test_a_plan_chooses_algorithms() -> None:
    trace = trace_of([1, 2])
    plan = replace(plan_of(trace), layer_algorithms=((1, "slow"),))
    assert simulate(trace, gpu(), plan).seconds == 11
    with pytest.raises(PlanMismatchError, match=r"op1.*no algorithm 'none'"):
        simulate(trace, gpu(), replace(plan, layer_algorithms=((1, "none"),)))


def test_peak_and_curve_follow_the_plan() -> None:
    trace = trace_of([1, 1, 1, 1], [(4, 0, 3), (2, 1, 2)])
    kept = simulate(trace, gpu(), plan_of(trace))
    assert (kept.curve, kept.peak(Tier.DEVICE), kept.peak_op) == ((4, 6, 6, 4), 6, 1)
    away = simulate(trace, gpu(), plan_of(trace, Offload(Tier.HOST, 0, 1, 3, 3), Keep()))
    assert away.curve == (4, 2, 2, 4)


def test_a_plan_for_another_trace_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="not for"):
        simulate(trace_of([1]), gpu(), plan_of(trace_of([1, 2])))


def with_managed(out: float, back: float, fault: float) -> HardwareProfile:
    """The machine by hand with managed memory of so many bytes per second."""
    ends = (Tier.HOST, Tier.DEVICE)
    return replace(
        gpu(),
        managed=ManagedLinks(
            Link(*reversed(ends), ((1, out),), out, 0.0, "managed"),  # type: ignore[misc]
            Link(*ends, ((1, back),), back, 0.0, "managed"),
            Link(*ends, ((1, fault),), fault, 0.0, "managed"),
        ),
    )


def test_managed_values_take_the_links_of_managed_memory() -> None:
    trace = trace_of([1, 1, 1, 1], [(8, 0, 3)])
    hardware = with_managed(out=4.0, back=8.0, fault=2.0)
    # Out for 2 s from 1 s on, and the compute that follows waits for it at once; back in 1 s.
    late = simulate(trace, hardware, plan_of(trace, Managed(1, 1, 3, 3)))
    assert late.seconds == 7.0
    assert [(s.cause, s.seconds) for s in late.stalls] == [(Cause.COPY_OUT, 2), (Cause.COPY_IN, 1)]
    # Waited for later, and asked back earlier: nothing waits but what is left of the way out.
    early = simulate(trace, hardware, plan_of(trace, Managed(1, 2, 2, 3)))
    assert early.seconds == 5.0
    assert early.moved == (Moved(Lane.COPY_OUT, 8, 1), Moved(Lane.COPY_IN, 8, 1))
    # Faults: 4 s for the way back.
    faulted = simulate(trace, hardware, plan_of(trace, Managed(1, 1, 3, 3, faults=True)))
    assert faulted.seconds == 10.0


def test_managed_blocks_have_room_of_their_own() -> None:
    trace = trace_of([1, 1, 1, 1], [(8, 0, 3)])
    timeline = simulate(trace, with_managed(1.0, 1.0, 1.0), plan_of(trace, Managed(1, 2, 3, 3)))
    assert timeline.curve == (16, 8, 8, 8)
    assert timeline.peak(Tier.HOST) == 8


def test_a_profile_without_links_of_managed_memory_is_refused() -> None:
    trace = trace_of([1, 1, 1], [(4, 0, 2)])
    with pytest.raises(TierError, match="machine 'by hand' has no links of managed memory"):
        simulate(trace, gpu(), plan_of(trace, Managed(1, 1, 2, 2)))


def test_order_edits_are_refused() -> None:
    trace = trace_of([1, 1])
    with pytest.raises(PlanMismatchError, match="order edits"):
        simulate(trace, gpu(), replace(plan_of(trace), order_edits=(OrderEdit(1, 0),)))


def test_a_tier_without_a_link_is_refused() -> None:
    trace = trace_of([1, 1, 1], [(4, 0, 2)])
    with pytest.raises(TierError, match="no link from device to host"):
        simulate(trace, cpu(), plan_of(trace, Offload(Tier.HOST, 0, 1, 2, 2)))


def test_large_traces_take_seconds_at_most() -> None:
    trace = strategies.random_trace(1, 6_000)
    hardware = strategies.machine(
        "cuda", link_rate=1e9, disk=True, disk_rate=1e9, allocator=Allocator(512, 0.0, 0)
    )
    far = [
        (index, value.first_save, value.first_read)
        for index, value in enumerate(trace.values)
        if index in set(trace.saved) and value.first_read is not None
    ]
    assignments = tuple(
        Assignment(index, Offload(Tier.HOST, save - 1, save + 4, read - 4, read))
        for index, save, read in far[:600]
        if save and read - save > 8
    )
    timeline = simulate(
        trace, hardware, Plan(trace.fingerprint, "test", Budget(1 << 40), assignments)
    )
    copies = next(moved.copies for moved in timeline.moved if moved.lane is Lane.COPY_IN)
    assert copies == len(assignments) > 500
    stalled = sum(stall.seconds for stall in timeline.stalls)
    assert timeline.seconds == pytest.approx(timeline.compute_seconds + stalled)
