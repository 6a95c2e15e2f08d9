from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belady.ir.encoding import encoding_of
from belady.ir.hardware import Allocator, HardwareProfile, Link
from belady.ir.legality import check
from belady.ir.plan import Assignment, Budget, Decision, Encode, Offload, Plan
from belady.ir.residency import away
from belady.ir.timeline import Lane
from belady.ir.trace import Tier, Trace
from belady.simulate import bound, simulate
from tests.support.strategies import instances, machine, random_trace

ROOMY = Budget(1 << 60)


def plan_for(trace: Trace, assignments: tuple[Assignment, ...] = ()) -> Plan:
    return Plan(trace.fingerprint, "drawn", ROOMY, assignments)


@st.composite
def cases(draw: st.DrawFn, *, encode: bool) -> tuple[Trace, HardwareProfile, Plan]:
    """A trace, a machine and a plan that `check` accepts, values in any order."""
    trace, hardware = draw(instances(max_ops=10))
    tiers = [tier for tier in (Tier.HOST, Tier.DISK) if hardware.capacity(tier)]
    chosen: list[Assignment] = []
    for index in draw(st.permutations(trace.saved)):
        value = trace.values[index]
        last = value.dropped if value.first_read is None else value.first_read
        kind = draw(st.sampled_from(("keep", "offload", "away", "away", *(["encode"] * encode))))
        inside = st.integers(value.first_save, last)
        points = sorted(draw(st.lists(inside, min_size=4, max_size=4)))
        decision: Decision
        if kind in ("away", "offload"):
            tier = draw(st.sampled_from(tiers))
            decision = Offload(tier, points[0] - 1, points[1], points[2], points[3])
            if kind == "away":
                # As long as can be: what lowers the peak.
                decision = Offload(tier, value.first_save - 1, points[0], last, last)
            gone, back = away(trace, index, decision)
            if gone >= back or trace.storages[value.storage].nbytes == 0:
                continue
        elif kind == "encode":
            encoding = encoding_of(trace, index)
            if encoding is None:
                continue
            decision = Encode(*encoding, value.first_save, points[3])
        else:
            continue
        chosen.append(Assignment(index, decision))
    return trace, hardware, plan_for(trace, tuple(chosen))


@given(cases(encode=True))
def test_plans_drawn_here_are_legal_and_peaks_agree_with_the_judge(
    case: tuple[Trace, HardwareProfile, Plan],
) -> None:
    trace, hardware, plan = case
    verdict = check(trace, hardware, plan, ROOMY)
    assert verdict.ok
    timeline = simulate(trace, hardware, plan)
    assert timeline.peak(Tier.DEVICE) == verdict.peak_bytes
    assert timeline.peak_op == verdict.peak_op
    assert timeline.peak(Tier.HOST) == verdict.host_bytes
    assert timeline.peak(Tier.DISK) == verdict.disk_bytes


@given(cases(encode=True))
def test_every_moment_is_work_or_a_stall(case: tuple[Trace, HardwareProfile, Plan]) -> None:
    trace, hardware, plan = case
    timeline = simulate(trace, hardware, plan)
    stalled = sum(stall.seconds for stall in timeline.stalls)
    assert all(stall.seconds > 0 for stall in timeline.stalls)
    assert timeline.seconds == pytest.approx(timeline.compute_seconds + stalled)
    work = [span for span in timeline.spans if span.lane is Lane.COMPUTE]
    pieces = sorted((piece.start_s, piece.end_s) for piece in (*work, *timeline.stalls))
    assert [start for start, _ in pieces] == pytest.approx([0.0, *(end for _, end in pieces[:-1])])
    assert pieces[-1][1] == pytest.approx(timeline.seconds)


@given(cases(encode=True))
def test_a_lane_does_one_thing_at_a_time(case: tuple[Trace, HardwareProfile, Plan]) -> None:
    trace, hardware, plan = case
    timeline = simulate(trace, hardware, plan)
    free_at: dict[str, float] = defaultdict(float)
    for span in timeline.spans:
        assert span.start_s >= free_at[span.lane]
        assert span.end_s >= span.start_s
        free_at[span.lane] = span.end_s
    assert timeline.seconds == pytest.approx(max(free_at.values()))


@given(instances(max_ops=12))
def test_keeping_everything_takes_the_time_of_its_ops(
    case: tuple[Trace, HardwareProfile],
) -> None:
    trace, hardware = case
    serial = trace.device == "cpu"
    prompt = replace(trace, ops=tuple(replace(op, host_seconds=0.0) for op in trace.ops))
    timeline = simulate(prompt, hardware, plan_for(prompt))
    assert timeline.seconds == pytest.approx(sum(op.device_seconds for op in trace.ops))
    if serial:
        both = sum(op.device_seconds + op.host_seconds for op in trace.ops)
        assert simulate(trace, hardware, plan_for(trace)).seconds == pytest.approx(both)


@given(instances(max_ops=12))
def test_keeping_everything_holds_the_bytes_of_the_trace(
    case: tuple[Trace, HardwareProfile],
) -> None:
    trace, hardware = case
    unit = hardware.allocator.round_bytes
    curve = []
    for index, op in enumerate(trace.ops):
        held = 0
        for storage in trace.storages:
            if storage.birth <= index < storage.death:
                held += (storage.nbytes + unit - 1) // unit * unit
        curve.append(held + (op.workspace_bytes + unit - 1) // unit * unit)
    timeline = simulate(trace, hardware, plan_for(trace))
    assert list(timeline.curve) == curve
    assert timeline.peak(Tier.DEVICE) == max(curve)


def faster(hardware: HardwareProfile, factor: float) -> HardwareProfile:
    """Every link ``factor`` times as fast, and none shared: sharing may reorder what is urgent."""
    links: list[Link] = []
    for index, link in enumerate(hardware.links):
        curve = tuple((nbytes, rate * factor) for nbytes, rate in link.curve)
        links.append(replace(link, curve=curve, path=f"path {index}"))
    return replace(hardware, links=tuple(links))


@given(cases(encode=False), st.sampled_from((1.5, 10.0, 1e6)))
def test_more_bandwidth_is_never_slower(
    case: tuple[Trace, HardwareProfile, Plan], factor: float
) -> None:
    trace, hardware, plan = case
    slow = simulate(trace, faster(hardware, 1.0), plan).seconds
    fast = simulate(trace, faster(hardware, factor), plan).seconds
    assert fast <= slow * (1 + 1e-9)


def one_path(hardware: HardwareProfile, duplex: float) -> HardwareProfile:
    """Both directions share a path on which they keep ``duplex`` of their rate."""
    links = (
        replace(link, path=link.path.split("-")[0], duplex_bytes_per_s=link.bytes_per_s * duplex)
        for link in hardware.links
    )
    return replace(hardware, links=tuple(links))


@settings(max_examples=300, deadline=None)
@given(cases(encode=False), st.sampled_from((0.0, 0.05)), st.sampled_from((0.3, 0.5, 0.85, 1.0)))
def test_no_plan_beats_the_bound(
    case: tuple[Trace, HardwareProfile, Plan], slack: float, duplex: float
) -> None:
    trace, hardware, plan = case
    hardware = one_path(hardware, duplex)
    not_below_the_bound(trace, hardware, plan, slack)


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(("cuda", "cpu")))
def test_no_plan_beats_the_bound_of_a_longer_trace(rng: random.Random, device: str) -> None:
    trace = random_trace(rng.randrange(1 << 30), rng.randrange(100, 300), device=device)
    hardware = machine(
        device,
        link_rate=rng.choice((1e9, 1e10, 1e11)),
        disk=device == "cpu",
        disk_rate=rng.choice((1e9, 1e10)),
        allocator=Allocator(512, 0.05, 0),
    )
    tier = Tier.DISK if device == "cpu" else Tier.HOST
    share, near = rng.random(), rng.randrange(1, 10)
    chosen: list[Assignment] = []
    for index in trace.saved:
        first, last = trace.values[index].first_save, trace.values[index].first_read
        if last is not None and last - first > 2 * near and rng.random() < share:
            decision = Offload(tier, first - 1, first + near, last - near, last)
            gone, back = away(trace, index, decision)
            if gone < back:
                chosen.append(Assignment(index, decision))
    hardware = one_path(hardware, rng.choice((0.3, 0.5, 0.85, 1.0)))
    not_below_the_bound(trace, hardware, plan_for(trace, tuple(chosen)), 0.0)


def not_below_the_bound(trace: Trace, hardware: HardwareProfile, plan: Plan, slack: float) -> None:
    timeline = simulate(trace, hardware, plan)
    needed = hardware.allocator.budget_for(timeline.peak(Tier.DEVICE))
    budget = Budget(int(needed * (1 + slack)))
    assert check(trace, hardware, plan, budget).ok
    best = bound(trace, hardware, budget)
    assert best.feasible
    assert best.needed_bytes <= needed
    assert best.seconds <= timeline.seconds * (1 + 1e-9)
