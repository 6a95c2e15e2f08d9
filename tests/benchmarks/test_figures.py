"""Tables of ours beside peers: who is faster in the same memory."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import tables
from benchmarks.comparison import compared, table


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
        ((6, 0.01), "not measured"),
    ],
)
def test_the_table_says_who_is_faster_in_the_same_memory(
    ours: tuple[int, float], words: str
) -> None:
    found = [record("checkpoint", 5, 0.1), record("belady:auto", *ours)]
    assert words in table(found)


def test_what_failed_within_the_cap_of_a_peer_does_not_fit() -> None:
    peer = record("checkpoint", 5, 0.1)
    failed = {"outcome": "infeasible", "error": "too small"}
    other = record("belady:auto", 0, 0.0, budget="100%:trl", **failed)
    assert "not measured" in table([peer, other])
    at_its_cap = record("belady:auto", 0, 0.0, budget="100%:checkpoint", **failed)
    assert "**does not fit**" in table([peer, at_its_cap])


def test_an_absent_peer_is_in_the_table() -> None:
    found = [record("trl", 1, 0.0, outcome="absent", error="not installed: trl")]
    ((title, of),) = compared(found)
    assert title == "resnet50, bf16"
    assert "absent: not installed: trl" in table(of)


def test_what_measuring_costs_is_told_of_cases_that_ran_undisturbed() -> None:
    case = {"workload": "resnet50", "precision": "bf16", "method": "belady:auto", "budget": "50%"}
    took = {"moved_values": 3, "pipelined_seconds": 0.1, "verified_seconds": [0.101, 0.103]}
    found = [
        {**case, **took, "every_event_seconds": 0.11},
        {**case, **took, "workload": "vit", "verified_seconds": [0.1]},
        {**case, **took, "allocation_retries": 2, "verified_seconds": [9.0]},
        {**case, "method": "plain", "pipelined_seconds": 0.1},
    ]
    told = tables.levels(found)
    assert "+1.0% (median of all 2 cases" in told
    assert "| belady:auto | 50% | 3 | 100.0 | 102.0 | +2.0% | 110.0 |" in told
    assert told.count("belady:auto") == 1
    assert tables.levels([]) == "No records yet.\n"


def test_slow_lanes_have_a_row_each() -> None:
    about = {"workload": "vgg19", "precision": "fp32", "method": "belady:auto", "budget": "12GiB"}
    links = [["device", "host", 50e9, 40e9], ["host", "device", 60e9, 40e9], ["host", "disk", 1, 1]]
    out = {"lane": "copy-out", "copies": 3, "bytes_per_s": 42e9}
    back = {"lane": "copy-in", "copies": 4, "bytes_per_s": 57e9}
    spilled = {"lane": "disk-write", "copies": 4, "bytes_per_s": 1.0}
    told = {**about, "links": links, "lanes": [out, back, spilled]}
    table = tables.lanes([told, about, {**about, "links": [], "lanes": [out]}])
    assert table.startswith("1 of 2 lanes copy at 90% or more")
    assert "all at 105% or more" in table
    assert "| vgg19 | fp32 | belady:auto | 12GiB | copy-out | 3 | 42.0 | 84% | 105% |\n" in table
    assert table.count("\n") == 6
    assert tables.lanes([about]) == "No records yet.\n"
