"""Budgets in percent are of what plain was seen to hold, in a process of its own."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import child, records, sweep
from benchmarks.cases import Case
from benchmarks.child import Known
from tests.benchmarks import played
from tests.benchmarks.played import HERE, stand_in

PLAIN = Case("vgg19", "plain", device="cpu", toy=True, repeats=2)
HALF = replace(PLAIN, method="belady:auto", budget="50%", repeats=3, equal_steps=4, round=1)


def test_what_a_budget_is_a_share_of() -> None:
    assert PLAIN.base == ""
    assert HALF.base == HALF.plain == PLAIN.plain == PLAIN.name
    of_peer = replace(HALF, budget="50%:checkpoint")
    assert of_peer.base == of_peer.cap_of("checkpoint") != of_peer.plain
    assert replace(HALF, precision="bf16").base != PLAIN.name


def test_plain_is_not_run_where_its_peak_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Known({}, {}, {HALF.plain: 6 << 20})

    def refused(*_: Any) -> None:
        raise AssertionError("plain runs")

    monkeypatch.setattr(child, "settled_peak", refused)
    record = child._outcome(replace(HALF, equal_steps=0), known)
    assert (record["outcome"], record["budget_bytes"]) == ("ok", 3 << 20)


def test_peaks_are_told_that_this_machine_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, int]] = []

    def measured(
        cases: list[Case], known: Any, _seconds: float, keep: Any, _gpu: Any
    ) -> tuple[list[Case], None]:
        told.append(dict(known["plain_peaks"]))
        keep(cases[0].as_json() | HERE | {"outcome": "ok", "peak_allocated_bytes": 7})
        return cases[1:], None

    stand_in(measured, monkeypatch)
    arguments = played.arguments(tmp_path)
    others = [
        PLAIN.as_json() | HERE | {"torch": "1", "outcome": "ok", "peak_allocated_bytes": 5},
        PLAIN.as_json() | HERE | {"outcome": "out of memory", "round": 1},
    ]
    records.write(arguments.out, others)
    sweep.execute([PLAIN, HALF], arguments, 60)
    assert told == [{}, {HALF.base: 7}]


def test_a_percentage_waits_for_plain_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, bounds = replace(PLAIN, workload="alexnet"), threading.Barrier(2, timeout=20)
    ended: list[Case] = []

    def measured(
        cases: list[Case], known: Any, _seconds: float, keep: Any, _gpu: Any
    ) -> tuple[list[Case], None]:
        (case,) = cases
        if case == HALF:
            assert PLAIN in ended
            assert known["plain_peaks"]
        else:
            bounds.wait()  # plain of both at once
            time.sleep(0.3 if case == PLAIN else 0.0)
        keep(case.as_json() | HERE | {"outcome": "ok", "peak_allocated_bytes": 7})
        ended.append(case)
        return [], None

    stand_in(measured, monkeypatch)
    sweep.execute([PLAIN, HALF, other], played.arguments(tmp_path, at_once=2), 60)
    assert ended == [other, PLAIN, HALF]
