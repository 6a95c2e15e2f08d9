"""Tables: who is faster in the same memory, and the founders' machines."""

from __future__ import annotations

from typing import Any

import pytest

from belady.ir.legality import check
from belady.ir.plan import Budget
from belady.planners import plan
from benchmarks.comparison import compared, table
from benchmarks.founders.claims import CLAIMS
from benchmarks.founders.machines import MACHINES
from benchmarks.founders.simulated import simulated
from benchmarks.founders.table import table as founders_table
from benchmarks.founders.traces import flops, observed_on, static
from benchmarks.workloads import WORKLOADS
from tests.benchmarks.test_workloads import toy


def record(method: str, cap: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "workload": "resnet50",
        "method": method,
        "budget": str(cap),
        "budget_bytes": cap << 30,
        "precision": "bf16",
        "channels_last": False,
        "group": "frontier",
        "outcome": "ok",
        "median_seconds": seconds,
        "peak_allocated_bytes": cap << 30,
        "device_name": "a device",
        "torch": "2",
        **more,
    }


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ((4, 0.08), "20% faster"),
        ((4, 0.13), "**30% slower**"),
        ((4, 0.1), "the same"),
        ((6, 0.01), "**does not fit**"),
    ],
)
def test_the_table_says_who_is_faster_in_the_same_memory(
    ours: tuple[int, float], words: str
) -> None:
    found = [record("checkpoint", 5, 0.1), record("belady:auto", *ours)]
    assert words in table(found)


def test_an_absent_peer_is_in_the_table() -> None:
    found = [record("trl", 1, 0.0, outcome="absent", error="not installed: trl")]
    ((title, of),) = compared(found)
    assert title == "resnet50, bf16"
    assert "absent: not installed: trl" in table(of)


def test_claims_name_machines_and_networks_that_are_there() -> None:
    for claim in CLAIMS:
        assert not claim.nets or claim.machine in MACHINES
        assert {net for net, _ in claim.nets} <= WORKLOADS.keys()


@pytest.mark.parametrize("name", ["vgg19", "resnet50", "googlenet"])
def test_a_trace_of_another_machine_is_a_trace(name: str) -> None:
    machine = MACHINES["Titan X"]
    work = toy(name)
    trace = observed_on(machine, static(work), flops(work))
    hardware = machine.profile()
    budget = Budget(machine.device_bytes)
    made = plan("auto", trace, hardware, budget)
    assert check(trace, hardware, made, budget).problems == ()
    assert all(op.device_seconds >= 0 for op in trace.ops)
    assert sum(op.device_seconds for op in trace.ops) > 0


def test_twice_the_rate_is_at_most_twice_as_fast() -> None:
    work = toy("vgg19")
    trace, counted = static(work), flops(work)
    slow, fast = (
        sum(op.device_seconds for op in observed_on(MACHINES[name], trace, counted).ops)
        for name in ("Titan X", "V100")
    )
    assert fast < slow < fast * 336 / 900 * 10


def test_the_founders_table_shows_what_was_simulated() -> None:
    found = list(simulated("Titan X", "alexnet", 128))
    assert {r["outcome"] for r in found} == {"simulated"}
    assert "| Titan X | alexnet | 128 |" in founders_table(found)
