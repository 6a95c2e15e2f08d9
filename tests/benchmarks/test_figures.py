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


def test_only_what_runs_the_same_kernels_is_judged() -> None:
    eager, fused = record("belady:auto", 4, 0.08), record("belady-inductor:auto", 4, 0.05)
    peers = [record("checkpoint", 5, 0.1), record("inductor-0.5", 5, 0.04)]
    assert _verdicts([*peers, eager, fused]) == ["20% faster", "**25% slower**"]
    assert _verdicts([*peers, eager]) == ["20% faster", "not measured"]
    assert _verdicts([*peers, fused]) == ["not measured", "**25% slower**"]
    assert _verdicts([*peers, record("belady-graph:auto", 4, 0.08)])[0] == "20% faster"
    failed = {"budget": "100%:inductor-0.5", "outcome": "infeasible"}
    assert _verdicts([*peers, record("belady:auto", 4, 0.0, **failed)])[1] == "not measured"
    other = record("belady-inductor:auto", 4, 0.0, **failed)
    assert _verdicts([*peers, other])[1] == "**does not fit**"


@pytest.mark.parametrize(
    ("in_a_row", "words"),
    [
        (0.11, "10% faster; in a row **10% slower**"),
        (0.091, "10% faster"),
        (0.085, "10% faster; in a row 15% faster"),
    ],
)
def test_a_verdict_says_what_holds_in_a_row(in_a_row: float, words: str) -> None:
    peer = record("checkpoint", 5, 0.1, pipelined_seconds=0.1)
    ours = record("belady:auto", 5, 0.09, pipelined_seconds=in_a_row)
    # Of another plan of ours, which is slower when waited for.
    other = record("belady:auto", 4, 0.2, pipelined_seconds=0.2)
    assert _verdicts([peer, ours, other]) == [words]
    assert f"| {in_a_row * 1e3:.1f} |" in table([peer, ours])


def test_what_flushed_is_marked_and_judged_by_nobody() -> None:
    peer, flushed = record("checkpoint", 5, 0.1), {"allocation_retries": 15}
    ours = record("belady:auto", 5, 0.05, **flushed)
    assert "| flushes: 15 |" in table([peer, ours])
    assert _verdicts([peer, ours]) == ["**only with flushes**"]
    assert _verdicts([peer, ours, record("belady:auto", 4, 0.2)]) == ["**100% slower**"]
    again = record("belady:auto", 5, 0.05, allocation_retries=0)
    assert _verdicts([peer, again, ours]) == ["**only with flushes**"]
    assert _verdicts([{**peer, **flushed}, again]) == ["not judged"]


def test_what_torch_does_not_count_is_not_told() -> None:
    found = table([record("inductor", 5, 0.1), record("inductor+graphs", 7, 0.1)])
    assert "| inductor | 5.00 | 100.0 |  |  | 5.00 |" in found
    assert "| inductor+graphs | 7.00 | 100.0 |  |  |  |" in found


def test_a_row_has_the_bound_in_its_own_cap() -> None:
    none = {"outcome": "ok", "method": "bound"}
    bounds = [
        {**record("bound", cap, 0.0), **none, "budget": of, "bound_seconds": seconds}
        for of, cap, seconds in (
            ("50%", 6, 0.05),
            ("100%:checkpoint", 9, 0.06),
            ("100%:trl", 8, None),
            ("100%:deepspeed", 3, 0.07),
            ("100%:inductor", 2, 0.07),
        )
    ]
    found = [
        record("checkpoint", 9, 0.2, budget="smallest"),
        record("trl", 8, 0.2, budget="smallest"),
        record("belady:auto", 9, 0.1, budget="100%:checkpoint"),
        record("belady:lifetime", 7, 0.1, budget="100%:checkpoint"),  # of a cap found before
        record("belady:auto", 6, 0.1, budget="50%"),
        record("belady-graph:auto", 5, 0.1, budget="50%"),
        record("belady-inductor:auto", 5, 0.1, budget="33%", own_bound_seconds=0.04),
        record("belady:auto", 4, 0.1, budget="smallest"),
        record("deepspeed", 4, 0.2, budget="smallest"),  # its cap grew while it was measured
        record("inductor", 2, 0.2, budget="smallest"),
    ]
    rows = table([*bounds, *found]).splitlines()[2:]
    bounded = [row.split(" | ")[4].strip() for row in rows]
    assert bounded == ["60.0", "60.0", "", "", "50.0", "", "40.0", "", "", ""]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([{"equal": True, "plain_repeats": True}], "yes"),
        ([{}, {"equal": True, "plain_repeats": True}], "yes"),
        ([{"equal": False, "plain_repeats": True}], "no"),
        ([{"equal": False, "plain_repeats": True}, {"equal": True}], "no"),
        ([{"equal": False, "plain_repeats": False}], "plain does not repeat"),
        ([{"equal": True, "plain_repeats": False}], "plain does not repeat"),
        ([{}], "not compared"),
        ([{"numerics": ["sections"]}], "not compared (sections)"),
    ],
)
def test_equality_is_told_only_where_plain_equals_itself(
    told: list[dict[str, Any]], words: str
) -> None:
    text = table([record("checkpoint", 5, 0.1, **more) for more in told])
    assert text.splitlines()[2].split(" | ")[-3] == words


def test_what_two_machines_measured_is_in_two_tables() -> None:
    here = [record("checkpoint", 5, 0.1), record("belady:auto", 4, 0.2)]
    there = [{**it, "torch": "3"} for it in here]
    lost = {name: value for name, value in here[0].items() if name not in ("device_name", "torch")}
    lost |= {"outcome": "crash"}
    assert [of for _, of in compared([*here, lost])] == [[*here, lost]]
    assert dict(compared([here[0], there[0], here[1], there[1], lost])) == {
        "resnet50, bf16, a device, torch 2": here,
        "resnet50, bf16, a device, torch 3": there,
        "resnet50, bf16, unknown device": [lost],
    }


def test_other_settings_of_cudnn_and_other_seeds_are_not_rounds_of_one_case() -> None:
    usual = record("plain", 5, 0.1)
    untimed = {**usual, "cudnn_benchmark": False}
    seeded = {**usual, "seed": 7}
    assert dict(compared([usual, untimed, seeded])) == {
        "resnet50, bf16": [usual],
        "resnet50, bf16, cuDNN untimed": [untimed],
        "resnet50, bf16, seed 7": [seeded],
    }


def test_of_rounds_that_ended_otherwise_the_failure_is_told() -> None:
    failed = record("belady:auto", 4, 0.0, outcome="out of memory", error="no room")
    told = table([record("belady:auto", 4, 0.1), failed])
    assert "out of memory: no room" in told
    assert "| ok" not in told


def test_what_shared_a_process_makes_way_for_the_same_by_itself() -> None:
    shared = [record("belady:auto", 4, seconds, shared=True) for seconds in (0.2, 0.4)]
    assert "| 300.0 |" in table(shared)
    told = table([*shared, record("belady:auto", 4, 0.1, shared=False)])
    assert "| 100.0 |" in told
    assert told.count("belady:auto") == 1
    other = record("belady:auto", 5, 0.1)
    assert "| 300.0 |" in table([*shared, other])


def _verdicts(found: list[dict[str, Any]]) -> list[str]:
    rows = [line.split(" | ") for line in table(found).splitlines()[2:]]
    told = {row[0].removeprefix("| "): row[-2].strip() for row in rows}
    return [told[it["method"]] for it in found if "belady" not in it["method"]]


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


def test_levels_that_took_turns_are_compared_with_one_another() -> None:
    case = {"workload": "resnet50", "precision": "bf16", "method": "belady:auto", "budget": "50%"}
    rows = {"0": [0.2, 0.4, 0.1], "1": [0.5, 0.1, 0.202]}
    took = {"moved_values": 3, "pipelined_seconds": 0.1, "verified_seconds": [0.3]}
    told = tables.levels([{**case, **took, "level_rows": rows, "every_event_seconds": 0.11}])
    assert "+1.0% (median of all 1 cases" in told
    assert "| belady:auto | 50% | 3 | 200.0 | 202.0 | +1.0% | 110.0 |" in told


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


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({}, "|  |"),
        ({"date": "2026-11-29T15:19:00"}, "| 2026-11-29 |"),
        (
            {"date": "2026-11-29", "planner": "auto:hybrid/21", "at_once": 4},
            "| 2026-11-29, hybrid/21, 4 at once |",
        ),
    ],
)
def test_a_row_says_when_and_of_which_plan_it_is(known: dict[str, Any], told: str) -> None:
    (line,) = (
        it for it in table([record("belady:auto", 4, 0.1, **known)]).splitlines() if "auto" in it
    )
    assert line.endswith(told)
