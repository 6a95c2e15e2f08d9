"""Plans that keep, copy and recompute: what is judged is what happens."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Assignment, Budget, Decision, Offload, Plan, Recompute
from belady.ir.replay import sources
from belady.ir.residency import away, offload_boundaries
from belady.ir.timeline import Lane
from belady.ir.trace import Source, Tier, Trace
from belady.planners.replays import cheapest
from belady.simulate import bound, simulate
from tests.support.strategies import instances, random_trace
from tests.unit.ir.engine import Engine
from tests.unit.ir.moments import GPU

ROOMY = Budget(1 << 60)


def plan_of(trace: Trace, decisions: Mapping[int, Decision]) -> Plan:
    assignments = tuple(Assignment(value, it) for value, it in decisions.items())
    return Plan(trace.fingerprint, "drawn", ROOMY, assignments)


def drawn_mix(rng: random.Random, trace: Trace, hardware: HardwareProfile) -> dict[int, Decision]:
    """Decisions that `check` accepts, values in any order, as many replays as may be."""
    found: dict[int, Decision] = {}
    tiers = [tier for tier in (Tier.HOST, Tier.DISK) if hardware.capacity(tier)]
    for index in rng.sample(trace.saved, len(trace.saved)):
        value = trace.values[index]
        last = value.dropped if value.first_read is None else value.first_read
        points = sorted(rng.randint(value.first_save, last) for _ in range(4))
        recomputed = {v for v, it in found.items() if isinstance(it, Recompute)}
        offload = Offload(rng.choice(tiers), points[0] - 1, *points[1:])
        replay = cheapest(trace, index, lambda v, gone=recomputed: v not in gone)  # type: ignore[misc]
        wanted = [it for it in (replay, replay, offload) if it is not None]
        decision = rng.choice(wanted)
        # Some replay may start from what is to move now.
        if check(trace, hardware, plan_of(trace, found | {index: decision}), ROOMY).ok:
            found[index] = decision
    return found


def drawn_together(
    rng: random.Random, trace: Trace, hardware: HardwareProfile, found: dict[int, Decision]
) -> dict[int, Decision]:
    """The same with some replays earlier, at the boundary of another one."""
    found = dict(found)
    for value, it in [*found.items()]:
        others = [at.at for at in found.values() if isinstance(at, Recompute)]
        if isinstance(it, Recompute):
            earlier = replace(it, at=min(it.at, rng.choice(others)))
            if check(trace, hardware, plan_of(trace, found | {value: earlier}), ROOMY).ok:
                found[value] = earlier
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Trace, HardwareProfile, Plan]:
    trace, hardware = draw(instances(max_ops=10))
    rng = draw(st.randoms(use_true_random=False))
    found = drawn_mix(rng, trace, hardware)
    if trace.source is Source.GRAPH:
        found = drawn_together(rng, trace, hardware, found)
    return trace, hardware, plan_of(trace, found)


def replays(plan: Plan) -> dict[int, Recompute]:
    return {v: it for v, it in plan.decisions.items() if isinstance(it, Recompute)}


def storages(trace: Trace, op: int, *, made: bool) -> set[int]:
    """Storages that an op writes, or that it touches at all."""
    it = trace.ops[op]
    return {trace.values[v].storage for v in (it.writes if made else (*it.reads, *it.writes))}


def counted(trace: Trace, plan: Plan, allocator: Allocator) -> list[int]:
    """Device bytes during each op, as the engine on paper holds them and replays pass by."""
    exact = Engine(trace, plan).run()
    found = []
    for index, op in enumerate(trace.ops):
        most = allocator.held(op.workspace_bytes)
        for values, ops in rows(trace, plan, index):
            own = {trace.values[value].storage for value in values}
            for place, step in enumerate(ops):
                # What was made by then and is read or written then or later.
                made = {s for o in ops[: place + 1] for s in storages(trace, o, made=True)}
                wanted = {s for o in ops[place:] for s in storages(trace, o, made=False)}
                beside = sum(allocator.held(trace.storages[s].nbytes) for s in made & wanted - own)
                scratch = allocator.held(trace.ops[step].workspace_bytes)
                most = max(most, beside + scratch)
        found.append(exact.held[index][Tier.DEVICE] + most)
    return found


def rows(trace: Trace, plan: Plan, boundary: int) -> list[tuple[list[int], list[int]]]:
    """Values that are made again at a boundary, by ops in a row: in a graph all in one."""
    here = [(v, it) for v, it in replays(plan).items() if it.at == boundary]
    if trace.source is not Source.GRAPH:
        return [([value], [*it.ops]) for value, it in here]
    ops: list[int] = []
    for _, it in sorted(here, key=lambda each: trace.values[each[0]].producer):
        ops += (op for op in it.ops if op not in ops)
    return [([value for value, _ in here], ops)]


def _keeps_the_budget_that_it_was_judged_by(
    trace: Trace, hardware: HardwareProfile, plan: Plan
) -> None:
    verdict = check(trace, hardware, plan, ROOMY)
    assert verdict.ok
    timeline = simulate(trace, hardware, plan)
    assert timeline.peak(Tier.DEVICE) == verdict.peak_bytes
    assert timeline.peak_op == verdict.peak_op
    assert timeline.peak(Tier.HOST) == verdict.host_bytes
    assert timeline.peak(Tier.DISK) == verdict.disk_bytes
    needed = Budget(hardware.allocator.budget_for(verdict.peak_bytes))
    assert check(trace, hardware, plan, needed).ok
    if verdict.peak_bytes:
        less = replace(needed, device_bytes=needed.device_bytes - 1)
        assert not check(trace, hardware, plan, less).ok


def _has_the_bytes_of_the_engine_and_of_the_replays(
    trace: Trace, hardware: HardwareProfile, plan: Plan
) -> None:
    hardware = replace(hardware, allocator=Allocator(1, 0.0, 0))
    said = list(simulate(trace, hardware, plan).curve)
    seen = counted(trace, plan, hardware.allocator)
    read = all(save.reads for v in plan.decisions for save in trace.values[v].saves)
    if read:
        assert said == seen
    assert all(a >= b for a, b in zip(said, seen, strict=True))


def _each_moment_is_work_a_replay_or_a_stall(
    trace: Trace, hardware: HardwareProfile, plan: Plan
) -> None:
    timeline = simulate(trace, hardware, plan)
    stalled = sum(stall.seconds for stall in timeline.stalls)
    at = {it.at for it in replays(plan).values()}
    runs = chain.from_iterable(ops for it in at for _, ops in rows(trace, plan, it))
    again = sum(trace.ops[op].device_seconds for op in runs)
    assert timeline.replay_seconds == pytest.approx(again)
    assert timeline.compute_seconds == pytest.approx(sum(op.device_seconds for op in trace.ops))
    assert timeline.seconds == pytest.approx(timeline.compute_seconds + again + stalled)


def _each_replay_comes_after_its_sources_and_before_its_reader(
    trace: Trace, hardware: HardwareProfile, plan: Plan
) -> None:
    timeline = simulate(trace, hardware, plan)
    compute = [span for span in timeline.spans if span.lane is Lane.COMPUTE]
    starts = {span.op: span.start_s for span in compute if span.value < 0}
    ended = {(span.lane, span.value): span.end_s for span in timeline.spans}
    runs = {span.value: span for span in compute if span.value >= 0}
    assert runs.keys() == replays(plan).keys()
    for value, it in replays(plan).items():
        assert runs[value].op == it.at
        assert runs[value].end_s <= starts[it.at]
        assert it.at == 0 or runs[value].start_s >= starts[it.at - 1]
        for source in sources(trace, it):
            for lane in (Lane.COPY_IN, Lane.DISK_READ):
                assert ended.get((lane, source), 0.0) <= runs[value].start_s
            move = plan.decisions.get(source)
            if isinstance(move, Offload):
                assert offload_boundaries(trace, move)[2] <= it.at
                assert away(trace, source, move)[1] <= it.at


@settings(max_examples=300, deadline=None)
@given(cases())
def test_what_is_judged_is_what_happens(case: tuple[Trace, HardwareProfile, Plan]) -> None:
    # All of it of each plan: to draw one takes longer than to look at it.
    _keeps_the_budget_that_it_was_judged_by(*case)
    _has_the_bytes_of_the_engine_and_of_the_replays(*case)
    _each_moment_is_work_a_replay_or_a_stall(*case)
    _each_replay_comes_after_its_sources_and_before_its_reader(*case)


@settings(max_examples=200, deadline=None)
@given(instances(max_ops=10), st.randoms(use_true_random=False))
def test_the_cheapest_replay_is_legal_and_no_part_of_it_is(
    case: tuple[Trace, HardwareProfile], rng: random.Random
) -> None:
    trace, hardware = case
    for index in trace.saved:
        found = cheapest(trace, index)
        if found is None:
            continue
        assert check(trace, hardware, plan_of(trace, {index: found}), ROOMY).ok
        for op in found.ops:
            part = replace(found, ops=tuple(other for other in found.ops if other != op))
            assert not check(trace, hardware, plan_of(trace, {index: part}), ROOMY).ok


def not_below_the_bound(
    trace: Trace, hardware: HardwareProfile, plan: Plan, slack: float = 0.0
) -> None:
    timeline = simulate(trace, hardware, plan)
    needed = hardware.allocator.budget_for(timeline.peak(Tier.DEVICE))
    best = bound(trace, hardware, Budget(int(needed * (1 + slack))))
    assert best.feasible
    assert best.needed_bytes <= needed
    assert best.seconds <= timeline.seconds * (1 + 1e-9)


@settings(max_examples=300, deadline=None)
@given(cases(), st.sampled_from((0.0, 0.05)))
def test_no_plan_beats_the_bound(case: tuple[Trace, HardwareProfile, Plan], slack: float) -> None:
    not_below_the_bound(*case, slack)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_without_links_no_plan_of_replays_beats_the_bound(
    case: tuple[Trace, HardwareProfile, Plan],
) -> None:
    trace, hardware, plan = case
    kept = {v: it for v, it in plan.decisions.items() if isinstance(it, Recompute)}
    hardware = replace(hardware, links=())
    # What started from a value that was to come back starts from a kept one.
    not_below_the_bound(trace, hardware, plan_of(trace, kept))


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_plan_beats_the_bound_of_a_longer_trace(rng: random.Random) -> None:
    trace = random_trace(rng.randrange(1 << 30), rng.randrange(60, 150))
    not_below_the_bound(trace, GPU, plan_of(trace, drawn_mix(rng, trace, GPU)))
