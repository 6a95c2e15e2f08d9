"""Budgets in percent are of what plain was seen to hold, in a process of its own."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import child, processes, records, sweep
from benchmarks.cases import BOUND, Case
from benchmarks.child import Known
from benchmarks.suites import SUITES
from tests.benchmarks import played
from tests.benchmarks.played import HERE, endings

PLAIN = Case("vgg19", "plain", device="cpu", toy=True, repeats=2)
HALF = replace(PLAIN, method="belady:auto", budget="50%", repeats=3, equal_steps=4, round=1)


def test_what_a_budget_is_a_share_of() -> None:
    assert PLAIN.base == ""
    assert HALF.base == HALF.plain == PLAIN.plain == PLAIN.name
    of_peer = replace(HALF, budget="50%:checkpoint")
    assert of_peer.base == of_peer.cap_of("checkpoint") != of_peer.plain
    assert replace(HALF, precision="bf16").base != PLAIN.name


def test_plain_is_not_run_where_its_peak_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Known({}, {HALF.plain: 6 << 20})

    def refused(*_: Any) -> None:
        raise AssertionError("plain runs")

    monkeypatch.setattr(child, "settled_peak", refused)
    record = child._outcome(replace(HALF, equal_steps=0), known)
    assert (record["outcome"], record["budget_bytes"]) == ("ok", 3 << 20)


def test_peaks_are_told_that_this_machine_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, int]] = []

    def ending(_case: Case, known: Any) -> dict[str, Any]:
        told.append(dict(known["bases"]))
        return {"outcome": "ok", "peak_allocated_bytes": 7}

    endings(ending, monkeypatch)
    arguments = played.arguments(tmp_path)
    others = [
        PLAIN.as_json() | HERE | {"torch": "1", "outcome": "ok", "peak_allocated_bytes": 5},
        PLAIN.as_json() | HERE | {"outcome": "out of memory", "round": 1},
    ]
    records.write(arguments.out, others)
    sweep.execute([PLAIN, HALF], arguments, 60)
    assert told == [{}, {HALF.base: 7}]


def test_plain_is_measured_where_a_percentage_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[Case] = []
    ended: dict[str, Any] = {"outcome": "out of memory"}

    def ending(case: Case, _known: Any) -> dict[str, Any]:
        begun.append(case)
        return ended

    endings(ending, monkeypatch)
    sweep.execute([HALF], played.arguments(tmp_path), 60)
    assert [case.name for case in begun] == [PLAIN.name]
    assert "left out, as there is no peak of plain: vgg19" in capsys.readouterr().out
    (tmp_path / "out.jsonl").unlink()
    ended = {"outcome": "ok", "peak_allocated_bytes": 7}
    sweep.execute([HALF], played.arguments(tmp_path), 60)
    assert begun[1:] == [begun[0], HALF]


def test_no_peak_under_a_budget_or_of_another_method_is_plains() -> None:
    found = HERE | {"outcome": "ok", "peak_allocated_bytes": 7, "budget_bytes": 5}
    others = [
        replace(PLAIN, budget="4GiB"),
        replace(PLAIN, budget="75%"),
        replace(PLAIN, method="belady:auto"),
    ]
    assert records.bases(case.as_json() | found for case in others) == {}
    again = replace(PLAIN, round=1, group="a suite").as_json() | found
    assert records.bases([again, {"question": "of kernels"}]) == {PLAIN.name: 7}
    assert records.bases([PLAIN.as_json() | {"outcome": "out of memory"}]) == {PLAIN.name: None}
    smallest = replace(PLAIN, budget="smallest").as_json() | found
    assert records.bases([smallest]) == {PLAIN.cap_of("plain"): 5}


def test_a_process_is_told_bases() -> None:
    case, kept = replace(HALF, equal_steps=0, repeats=2), list[dict[str, Any]]()
    rest, ended = processes.measure([case], {"bases": {case.base: 6 << 20}}, 120.0, kept.append)
    assert (rest, ended) == ([], None)
    assert [(it["outcome"], it["budget_bytes"]) for it in kept] == [("ok", 3 << 20)]


@pytest.mark.parametrize("suite", ["frontier", "targets", "shares", "ocdnn", "average"])
def test_ours_at_a_share_has_a_process_of_its_own(suite: str) -> None:
    cases = [it for it in SUITES[suite]() if it.base and it.method != BOUND]
    assert cases
    assert not any(it.shared for it in cases)


def test_a_percentage_waits_for_plain_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, bounds = replace(PLAIN, workload="alexnet"), threading.Barrier(2, timeout=20)
    ended: list[Case] = []

    def ending(case: Case, known: Any) -> dict[str, Any]:
        if case == HALF:
            assert PLAIN in ended
            assert known["bases"]
        else:
            bounds.wait()  # plain of both at once
            time.sleep(0.3 if case == PLAIN else 0.0)
        ended.append(case)
        return {"outcome": "ok", "peak_allocated_bytes": 7}

    endings(ending, monkeypatch)
    sweep.execute([PLAIN, HALF, other], played.arguments(tmp_path, at_once=2), 60)
    assert ended == [other, PLAIN, HALF]
