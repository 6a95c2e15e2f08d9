"""What it costs that a value leaves the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.ir.hardware import Link
from belady.ir.plan import Budget
from belady.ir.trace import Source, Tier
from belady.planners.moves import Case, movable
from belady.planners.spread import held_bytes
from belady.planners.ways import Ways
from tests.support.builder import OpSpec, build_trace
from tests.unit.planners.nets import cpu, gpu, written_by


@pytest.mark.parametrize(
    ("device", "host_us", "cheapest"),
    [
        ("cuda", 5, "two short ones"),
        ("cuda", 1_000, "one op"),
        ("cpu", 1_000, "one op"),
        ("cpu", 5, "two short ones"),
    ],
)
def test_replays_cost_what_the_busier_of_host_and_device_takes(
    device: str, host_us: int, cheapest: str
) -> None:
    conv = OpSpec(10**8, device_us=100, host_us=host_us)
    one = OpSpec(10**8, device_us=300, host_us=host_us, replayable=True)
    first = OpSpec(10**8, device_us=20, host_us=host_us, replayable=True)
    second = OpSpec(10**8, device_us=20, host_us=host_us, replayable=True, saves_input=False)
    trace = build_trace([conv, one, conv, first, second, conv, conv], device=device)
    case = Case(trace, cpu() if device == "cpu" else gpu(), Budget(1 << 40))
    ways = Ways(case, {value: held_bytes(case, value) for value in movable(trace)})
    ops = {"one op": 1, "two short ones": 4}
    assert min(ops, key=lambda it: ways.cost[written_by(trace, ops[it])]) == cheapest


@pytest.mark.parametrize(
    ("device", "source", "part"),
    [
        ("cuda", Source.EAGER, 0.25),
        ("cuda", Source.GRAPH, 0.0),
        ("cpu", Source.EAGER, 1.0),
        ("cpu", Source.GRAPH, 1.0),
    ],
)
def test_a_busier_device_hides_most_of_what_the_host_takes(
    device: str, source: Source, part: float
) -> None:
    conv = OpSpec(10**8, device_us=1000, host_us=40)
    costs = []
    for host_us in (40, 200):
        spec = replace(conv, replayable=True, host_us=host_us)
        trace = replace(build_trace([conv, spec, *[conv] * 3], device=device), source=source)
        case = Case(trace, cpu() if device == "cpu" else gpu(), Budget(1 << 40))
        ways = Ways(case, {value: held_bytes(case, value) for value in movable(trace)})
        value = written_by(trace, 1)
        costs.append(ways.cost[value] * held_bytes(case, value))
    # On a CPU the host computes, and nothing else is there to be busier.
    assert costs[1] - costs[0] == pytest.approx(part * 160e-6)


@pytest.mark.parametrize(("source", "hooks"), [(Source.EAGER, 1e-3), (Source.GRAPH, 0.0)])
def test_hooks_are_part_of_what_a_busy_host_takes_for_a_replay(
    source: Source, hooks: float
) -> None:
    conv = OpSpec(10**8, device_us=1, host_us=50)
    trace = replace(build_trace([conv, replace(conv, replayable=True), *[conv] * 3]), source=source)
    case = Case(trace, replace(gpu(), hook_s=1e-3), Budget(1 << 40))
    ways = Ways(case, {value: held_bytes(case, value) for value in movable(trace)})
    value = written_by(trace, 1)
    assert ways.cost[value] * held_bytes(case, value) == pytest.approx(50e-6 + hooks)


@pytest.mark.parametrize(("source", "taking"), [(Source.EAGER, 2e-3), (Source.GRAPH, 0.0)])
def test_a_graph_takes_nothing_over_for_a_replay(source: Source, taking: float) -> None:
    conv = OpSpec(10**8, device_us=1, host_us=50)
    trace = replace(build_trace([conv, replace(conv, replayable=True), *[conv] * 3]), source=source)
    memory = Link(Tier.DEVICE, Tier.DEVICE, ((1, 1e12),), 1e12, 0.0, "memory", issue_s=1e-3)
    machine = replace(gpu(), links=(*gpu().links, memory))
    case = Case(trace, machine, Budget(1 << 40))
    ways = Ways(case, {value: held_bytes(case, value) for value in movable(trace)})
    value = written_by(trace, 1)
    assert ways.cost[value] * held_bytes(case, value) == pytest.approx(50e-6 + taking)
