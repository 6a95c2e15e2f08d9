"""What a network-wide allocation takes, what is held on average, and the table of both."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from belady.ir.hardware import Allocator
from belady.ir.timeline import Held
from belady.ir.trace import Phase, Trace
from benchmarks.average import NetworkWide, average, held_on_average, network_wide
from benchmarks.average_table import table
from benchmarks.founders.claims import AVERAGE_LESS
from benchmarks.suites import SUITES
from tests.support.builder import OpSpec, build_trace

EXACT, ROUNDING = Allocator(1, 0.0, 0), Allocator(512, 0.0, 0)
INPUT = 4096  # of the traces that are built
CHAIN = [
    OpSpec(nbytes=1000, workspace_bytes=70),
    OpSpec(nbytes=2000, parameter_bytes=300),
    OpSpec(nbytes=500, workspace_bytes=90),
]


def with_seconds(trace: Trace, *seconds: float) -> Trace:
    ops = (replace(op, device_seconds=s) for op, s in zip(trace.ops, seconds, strict=True))
    return replace(trace, ops=tuple(ops))


def test_a_network_wide_allocation_has_every_map_of_forward_at_once() -> None:
    # Backward makes dX of the last layer, 2000 bytes, and reads it beside that of the middle one.
    found = network_wide(build_trace(CHAIN), EXACT)
    assert found == NetworkWide(600, INPUT + 3500, 3000, 90)


def test_layers_in_place_have_one_map() -> None:
    in_place = OpSpec(nbytes=1000, in_place=True, saves_input=False)
    trace = build_trace([OpSpec(nbytes=1000), in_place, OpSpec(nbytes=8)])
    assert network_wide(trace, EXACT).feature_maps == INPUT + 1008


def test_gradients_that_wait_at_a_fork_are_alive_beside_others() -> None:
    fork = [OpSpec(), OpSpec(branch=1), OpSpec(branch=1), OpSpec()]
    straight = network_wide(build_trace([OpSpec()] * 4), EXACT).gradient_maps
    assert straight < network_wide(build_trace(fork), EXACT).gradient_maps


def test_bytes_are_those_that_the_allocator_gives_out() -> None:
    assert network_wide(build_trace(CHAIN), ROUNDING) == NetworkWide(1024, 7680, 3072, 512)


def test_an_average_is_over_kernel_time_and_not_the_optimizers() -> None:
    trace = with_seconds(build_trace([OpSpec()]), 1.0, 3.0)
    assert average([100, 20], trace) == 40
    last = replace(trace.ops[1], phase=Phase.OPTIMIZER)
    assert average([100, 20], replace(trace, ops=(trace.ops[0], last))) == 100


def run_of(trace: Trace, held: tuple[Held, ...]) -> Any:
    return SimpleNamespace(
        trace=trace,
        hardware=SimpleNamespace(allocator=EXACT),
        predicted=SimpleNamespace(curve=(1000, 3000)),
        measured=SimpleNamespace(held=held),
    )


def test_a_record_tells_parameters_apart_and_what_was_sampled() -> None:
    # The gradient of the parameter comes with backward.
    trace = with_seconds(build_trace([OpSpec(parameter_bytes=300)]), 1.0, 1.0)
    found = held_on_average(run_of(trace, (Held(1, 2.0, 600), Held(0, 1.0, 900), Held(2, 5.0, 0))))
    assert (found["average_bytes"], found["average_persistent_bytes"]) == (2000, 450)
    assert found["sampled_average_bytes"] == (900 * 1 + 600 * 3) // 4
    assert found["network_wide"]["persistent"] == 600
    assert "sampled_average_bytes" not in held_on_average(run_of(trace, ()))


def record(method: str, budget: str, seconds: float, **more: Any) -> dict[str, Any]:
    about = {"workload": "alexnet", "method": method, "budget": budget, "group": "average"}
    return {**about, "outcome": "ok", "median_seconds": seconds, **more}


def ours(budget: str, seconds: float, average_bytes: float, **more: Any) -> dict[str, Any]:
    wide = NetworkWide(2 << 30, 6 << 30, 1 << 30, 1 << 30)._asdict()
    known = {"average_bytes": int(average_bytes * 2**30), "average_persistent_bytes": 1 << 30}
    kept = {"network_wide": wide, "numerics": [], **known, **more}
    return record("belady:auto", budget, seconds, **kept)


def test_the_table_sets_averages_against_the_network_wide_allocation() -> None:
    slices = {"network_wide": {"persistent": 1}, "numerics": ["sections"]}
    found = table(
        [
            record("plain", "none", 0.1),
            ours("50%", 0.12, 4, **slices, budget_bytes=5 << 30, sampled_average_bytes=3 << 30),
            ours("none", 0.1, 6),
            ours("none", 0.12, 7),
            record("belady:auto", "25%", 0.1, outcome="infeasible"),
        ]
    )
    rows = [line[2:-2].split(" | ") for line in found.splitlines()[2:]]
    assert [row[1:3] for row in rows] == [
        ["plain", "none"],
        ["belady:auto (sections)", "50%: 5.00 GiB"],
        ["belady:auto", "none"],
        ["belady:auto", "25%"],
    ]
    assert rows[0][3:] == ["", "", "", "", "", "89%", "+0.0%"]
    assert rows[1][3:] == ["10.00", "4.00", "3.00", "60%", "62%", "89%", "+20.0%"]
    assert rows[2][3:] == ["10.00", "6.50", "", "35%", "31%", "89%", "+10.0%"]
    assert rows[3][3] == "infeasible"
    assert len({len(row) for row in rows}) == 1


def test_what_two_machines_measured_is_in_two_tables() -> None:
    found = [record("plain", "none", 0.1), ours("50%", 0.12, 4), ours("none", 0.1, 6)]
    here = [it | {"device_name": "A", "torch": "2"} for it in found]
    there = [it | {"device_name": "B", "torch": "2", "median_seconds": 0.2} for it in found]
    one, two = table([*here, *there]).split("\n**B, torch 2**\n\n")
    assert one == f"**A, torch 2**\n\n{table(here)}"
    assert two == table(there)
    assert "+20.0%" in one
    assert "+20.0%" not in two


def test_without_records_the_table_says_so() -> None:
    assert table([ours("none", 0.1, 6) | {"group": "founders"}]) == "No records yet.\n"


@pytest.mark.parametrize("net", AVERAGE_LESS)
def test_the_suite_begins_with_plain_and_with_everything_kept(net: str) -> None:
    cases = [case for case in SUITES["average"]() if case.workload == net]
    assert [(case.method, case.budget) for case in cases[:3]] == [
        ("plain", "none"),
        ("belady:auto", "none"),
        ("belady:vdnn_all", "own"),
    ]
    assert {case.sizes for case in cases} == {(("batch", 128),)}
