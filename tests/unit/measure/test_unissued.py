"""What changes in a plan whose forward and backward are one launch each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest

from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Assignment, Budget, Offload, Plan
from belady.ir.timeline import Lane, Measured, Span, Timeline
from belady.ir.trace import Phase, Storage, StorageKind, Tier, Trace, Value
from belady.measure.trial import Trial
from belady.measure.unissued import (
    for_launches,
    freed,
    in_time,
    launching,
    small_bytes,
    unissued,
)
from belady.planners import plan as make_plan
from belady.simulate import simulate
from belady.simulate.engine import last_of_forward
from tests.support.builder import OpSpec, build_trace
from tests.support.strategies import machine as drawn

LAYERS = 24
EVERYWHERE = range(2 * LAYERS)
MIB = 1 << 20
# Nothing of it is the host's.
AT_ONCE = Measured(1, 0.0, (0.0,), ())


def machine(bytes_per_s: float) -> HardwareProfile:
    allocator = Allocator(1, 0.0, 0)
    made = drawn("cuda", link_rate=bytes_per_s, disk=False, disk_rate=1.0, allocator=allocator)
    return replace(made, joins=True)


def network(loss: bool = False) -> Trace:
    specs = [OpSpec(nbytes=MIB, device_us=100) for _ in range(LAYERS)]
    return unissued(build_trace(specs, every_boundary=True, input_held=False, loss=loss))


def sending_all(trace: Trace, free_at: int, *, late: int) -> Plan:
    """Every input of a layer goes to host memory as soon as it is saved; the last saved first."""
    found = []
    for index in reversed(trace.saved):
        value = trace.values[index]
        read = value.first_read
        if read is None or trace.storages[value.storage].persistent or read <= free_at + late:
            continue
        decision = Offload(Tier.HOST, value.first_save - 1, free_at, read - 1, read)
        found.append(Assignment(index, decision))
    return Plan(trace.fingerprint, "test", Budget(1 << 30), tuple(found))


def begins(trace: Trace) -> int:
    return [op.phase for op in trace.ops].index(Phase.BACKWARD)


def launched(trace: Trace, hardware: HardwareProfile, plan: Plan) -> float:
    return simulate(trace, hardware, plan).seconds


def issued(trace: Trace, hardware: HardwareProfile, plan: Plan) -> Timeline:
    """Without the wait."""
    return simulate(trace, replace(hardware, joins=False), plan)


def outs(trace: Trace, hardware: HardwareProfile, plan: Plan) -> list[Span]:
    spans = (it for it in issued(trace, hardware, plan).spans if it.lane is Lane.COPY_OUT)
    return sorted(spans, key=lambda it: it.start_s)


@pytest.mark.parametrize(
    "boundaries", [EVERYWHERE, [it for it in EVERYWHERE if it % 5 != 2], [2 * LAYERS]]
)
@pytest.mark.parametrize("loss", [False, True])
def test_what_would_outlast_forward_is_issued_in_backward_in_the_same_order(
    loss: bool, boundaries: Sequence[int]
) -> None:
    trace, hardware = network(loss), machine(2.5e9)
    first = begins(trace)
    plan = sending_all(trace, first + 12, late=2)
    found = in_time(trace, hardware, plan, boundaries)
    assert check(trace, hardware, found, plan.budget).ok
    before, after = outs(trace, hardware, plan), outs(trace, hardware, found)
    assert [it.value for it in before] == [it.value for it in after]
    moved = {
        value
        for value, decision in found.decisions.items()
        if isinstance(decision, Offload) and decision.copy_out_after + 1 >= first
    }
    assert 2 < len(moved) < len(before)
    # As if nothing had been changed, but for what was at half when forward ended.
    lasts = max(it.end_s - it.start_s for it in before)
    assert found.predicted_seconds == simulate(trace, hardware, found).seconds
    for one, two in zip(before, after, strict=True):
        assert one.end_s <= two.end_s <= one.end_s + lasts
    assert launched(trace, hardware, found) < launched(trace, hardware, plan)
    # All else stays.
    for index, decision in plan.decisions.items():
        assert isinstance(decision, Offload)
        other = found.decisions[index]
        assert isinstance(other, Offload)
        assert replace(other, copy_out_after=decision.copy_out_after) == decision
    # Each at a boundary of its own.
    at = [
        move.copy_out_after
        for it in after
        if isinstance(move := found.decisions[it.value], Offload)
    ]
    assert all(one < two for one, two in pairwise(at))
    # Where there are enough.
    assert ({it + 1 for it in at if it + 1 > first} <= {*boundaries}) == (len(boundaries) > 1)


@pytest.mark.parametrize("rate", [1e9, 2.5e9, 6e9])
@pytest.mark.parametrize("free_at", [0, 1, 3, 8, 12])
def test_it_is_never_slower(free_at: int, rate: float) -> None:
    trace, hardware = network(), machine(rate)
    plan = sending_all(trace, begins(trace) + free_at, late=2)
    found = in_time(trace, hardware, plan, EVERYWHERE)
    before, after = launched(trace, hardware, plan), launched(trace, hardware, found)
    same = found.assignments == plan.assignments
    assert found.predicted_seconds == after
    assert after < before or (same and before == after)
    # What backward waits for at once may as well go out before.
    assert same or free_at > 0


def test_a_launch_ends_with_its_copies() -> None:
    trace = network()
    plan = sending_all(trace, begins(trace) + 12, late=2)
    for rate, waits in ((1e12, False), (2.5e9, True)):
        hardware = machine(rate)
        before, took = issued(trace, hardware, plan).seconds, launched(trace, hardware, plan)
        assert (took > 1.05 * before) == waits
        assert waits or took == pytest.approx(before)


@pytest.mark.parametrize("loss", [False, True])
def test_what_is_sent_where_forward_ends_is_waited_for_where_that_is_forwards(loss: bool) -> None:
    """An engine does what is due where the loss begins when forward ends, and not in backward."""
    specs = [OpSpec(nbytes=MIB, device_us=100) for _ in range(LAYERS)]
    trace = unissued(build_trace(specs, every_boundary=True, input_held=False, loss=loss))
    hardware, last = machine(3e9), last_of_forward(trace)
    (index,) = (it for it in trace.saved if trace.values[it].producer == 2)
    read = trace.values[index].first_read
    assert read is not None

    def waits(after: int) -> bool:
        move = Offload(Tier.HOST, after, begins(trace) + 5, read - 1, read)
        plan = Plan(trace.fingerprint, "test", Budget(1 << 40), (Assignment(index, move),))
        return launched(trace, hardware, plan) > issued(trace, hardware, plan).seconds

    assert waits(last - 1)
    assert waits(last) == loss
    assert not waits(begins(trace))


def test_what_cannot_go_later_has_the_seconds_that_it_takes() -> None:
    """One copy is half done when forward ends; the other one is in backward as it is."""
    specs = [OpSpec(nbytes=MIB, device_us=100) for _ in range(8)]
    trace = unissued(build_trace(specs, every_boundary=True, input_held=False))
    hardware, found = machine(6e9), list[Assignment]()
    for index, out in ((1, 6), (0, 7)):
        read = trace.values[index].first_read
        assert read is not None
        move = Offload(Tier.HOST, out, read - 2, read - 1, read)
        found.append(Assignment(index, move))
    plan = Plan(trace.fingerprint, "test", Budget(1 << 40), tuple(found))
    plan = replace(plan, predicted_seconds=issued(trace, hardware, plan).seconds)
    later = in_time(trace, hardware, plan, range(17))
    assert later.predicted_seconds == launched(trace, hardware, later) > plan.predicted_seconds


def test_what_has_gone_by_then_stays() -> None:
    trace = network()
    for rate, free_at in ((1e12, begins(trace) + 12), (3e9, begins(trace) - 1)):
        hardware = machine(rate)
        plan = sending_all(trace, free_at, late=2)
        assert plan.decisions
        # It is copied in time, or waited for anyway.
        assert in_time(trace, hardware, plan, EVERYWHERE).assignments == plan.assignments


def test_without_a_backward_there_is_nothing_to_do() -> None:
    trace = network()
    forward = replace(trace, ops=tuple(it for it in trace.ops if it.phase is Phase.FORWARD))
    plan = Plan(forward.fingerprint, "test", Budget(1 << 30), ())
    assert in_time(forward, machine(3e9), plan, []).assignments == ()


@pytest.mark.parametrize(
    ("joined", "sending", "asked", "wins"),
    [(1.0, 0.9, [True], True), (1.5, 1.0, [True, False], False), (1.5, 1.49, [True, False], True)],
)
def test_a_plan_that_sends_late_has_to_gain(
    joined: float, sending: float, asked: list[bool], wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds are those of plans, in multiples of all kernels."""
    trace, machines = network(), list[HardwareProfile]()
    kernels = sum(op.device_seconds for op in trace.ops)

    def ask(hardware: HardwareProfile) -> tuple[Plan, HardwareProfile]:
        machines.append(hardware)
        seconds = kernels * (joined if hardware.joins else sending)
        plan = Plan(trace.fingerprint, str(hardware.joins), Budget(1 << 30), ())
        return replace(plan, predicted_seconds=seconds), replace(hardware, name="as planned")

    def again(hardware: HardwareProfile) -> tuple[Plan, HardwareProfile]:
        assert hardware.name == "as planned"
        return ask(hardware)

    monkeypatch.setattr(
        "belady.measure.unissued.in_time", lambda trace, hardware, plan, seams: plan
    )
    plan, hardware = for_launches(trace, machine(3e9), EVERYWHERE, ask, again)
    assert [it.joins for it in machines] == asked
    assert (plan.planner, hardware.name) == (str(wins), "as planned")
    assert hardware.joins


def test_a_search_that_knows_of_the_wait_loses_little_to_it() -> None:
    # Every other op is as cheap to run again as a norm.
    specs = [
        OpSpec(nbytes=MIB, device_us=100 if at % 2 else 10, replayable=True) for at in range(LAYERS)
    ]
    trace, hardware = unissued(build_trace(specs, input_held=False)), machine(6e9)
    keeping = Plan(trace.fingerprint, "keep", Budget(1 << 30), ())
    budget = Budget(simulate(trace, hardware, keeping).peak(Tier.DEVICE) * 5 // 8)

    def planned(it: HardwareProfile) -> Plan:
        return make_plan("hybrid", trace, it, budget)

    knowing, unknowing = planned(hardware), planned(replace(hardware, joins=False))
    assert launched(trace, hardware, knowing) == knowing.predicted_seconds
    late = in_time(trace, hardware, unknowing, EVERYWHERE)
    assert knowing.predicted_seconds < late.predicted_seconds < launched(trace, hardware, unknowing)


def test_what_backward_is_given_goes_when_it_is_read() -> None:
    """Of a launch nobody holds it, as autograd does while backward is issued."""
    specs = [OpSpec(nbytes=MIB, device_us=100) for _ in range(LAYERS)]
    trace = build_trace(specs, every_boundary=True, input_held=False)
    backward, end = begins(trace), len(trace.ops)
    number = next(
        trace.values[value].storage
        for value in trace.ops[backward].reads
        if not trace.storages[trace.values[value].storage].persistent
    )
    last = max(
        at
        for at, op in enumerate(trace.ops)
        if number in {trace.values[value].storage for value in op.reads}
    )
    for birth, kind in product((0, backward), StorageKind):
        storages = list(trace.storages)
        storages[number] = replace(
            storages[number], kind=kind, birth=birth, released=end, death=end
        )
        held = replace(trace, storages=tuple(storages))
        found = unissued(held).storages[number]
        goes = birth == backward and kind is StorageKind.INPUT
        assert (found.released, found.death) == ((last + 1,) * 2 if goes else (end, end))
        others = [it for at, it in enumerate(unissued(held).storages) if at != number]
        assert others == [it for at, it in enumerate(held.storages) if at != number]


def test_what_forward_gives_goes_with_its_launch_and_what_a_loss_needs_is_not_of_one() -> None:
    specs = [OpSpec(nbytes=MIB, device_us=100, workspace_bytes=7) for _ in range(LAYERS)]
    trace = build_trace(specs, every_boundary=True, input_held=False, loss=True)
    ended, end = last_of_forward(trace) + 1, len(trace.ops)
    assert trace.ops[ended].phase is Phase.LOSS
    read = {trace.values[value].storage for op in trace.ops[ended:] for value in op.reads}
    result = Storage("cuda:0", MIB, StorageKind.ACTIVATION, ended - 1, end, end)
    number = len(trace.storages)
    value = Value(number, 0, ended - 1, (), ())
    last = trace.ops[ended - 1]
    ops = list(trace.ops)
    ops[ended - 1] = replace(last, writes=(*last.writes, len(trace.values)))
    storages, values = (*trace.storages, result), (*trace.values, value)
    found = unissued(replace(trace, ops=tuple(ops), storages=storages, values=values))
    assert (found.storages[number].released, found.storages[number].death) == (ended + 1,) * 2
    for at in read:
        assert found.storages[at] == trace.storages[at]
    assert [op.workspace_bytes for op in found.ops] == [
        0 if at == ended else 7 for at in range(end)
    ]


@pytest.mark.parametrize(("corrected", "left"), [(0.4, 0.2), (0.2, 0.2), (0.05, 0.05)])
def test_what_issued_iterations_lose_between_blocks_is_not_left_to_launches(
    corrected: float, left: float
) -> None:
    probed = replace(machine(1e9), allocator=Allocator(1, 0.2, 7), joins=False)
    hardware = replace(probed, allocator=Allocator(1, corrected, 7))
    found = launching(hardware, probed, 5)
    assert found.allocator == Allocator(1, left, 12)
    assert found.joins


def test_small_gradients_have_room_beside_packed_blocks() -> None:
    trace, budget = network(), 100 * MIB
    gradient = replace(trace.storages[0], nbytes=MIB, kind=StorageKind.GRADIENT)
    many = [gradient] * 5, [replace(gradient, nbytes=MIB + 1)] * 7, [trace.storages[0]] * 9
    trace = replace(trace, storages=tuple(it for some in many for it in some))
    assert small_bytes(trace, budget) == 3 * MIB
    assert small_bytes(trace, 3 * budget) == 0
    # An allocator that places blocks has them among the others.
    assert small_bytes(trace, 0) == 0


@pytest.mark.parametrize(("host_us", "gains"), [(5, 0.0), (150, 1 / 7)])
def test_launches_gain_what_an_iteration_waits_for_its_host(host_us: int, gains: float) -> None:
    specs = [OpSpec(nbytes=MIB, device_us=100, host_us=host_us) for _ in range(LAYERS)]
    trace = build_trace(specs, every_boundary=True)
    plan = make_plan("baseline", trace, machine(1e9), Budget(1 << 30))
    without, issued = freed(
        trace, machine(1e9), plan, Trial(plan, machine(1e9), "baseline"), AT_ONCE
    )
    # Forward, which takes a third of the device's time, waits for half as long again.
    assert 1 - without / issued == pytest.approx(gains, abs=0.02)


@pytest.mark.parametrize(("times", "slower"), [(3.0, 3.0), (0.5, 1.0)])
def test_what_an_iteration_took_longer_than_foretold_counts_as_the_hosts(
    times: float, slower: float
) -> None:
    trace, late = network(), machine(1e9)
    plan, other = sending_all(trace, begins(trace), late=0), sending_all(trace, 0, late=0)
    run = Trial(other, late, "vdnn_all")
    without, issued = freed(trace, late, plan, run, AT_ONCE)
    took = times * simulate(trace, late, other).seconds
    measured = Measured(1, took, (2 * took, took), ())
    assert freed(trace, late, plan, run, measured) == (without, pytest.approx(slower * issued))


def test_launches_issue_no_copies() -> None:
    trace, late = network(), replace(machine(1e12), hook_s=0.0)
    late = replace(late, links=tuple(replace(link, issue_s=1e-3) for link in late.links))
    plan = sending_all(trace, begins(trace), late=0)
    without, issued = freed(trace, late, plan, Trial(plan, late, "vdnn_all"), AT_ONCE)
    assert without < 0.5 * issued
