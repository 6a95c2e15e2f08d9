"""Cases: rounds, processes, records, and all of it once in real processes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import frontier, records, sweep
from benchmarks.cases import Case, from_json
from benchmarks.errors import GivenError
from benchmarks.plot import points
from benchmarks.processes import grouped
from benchmarks.run import in_rounds
from benchmarks.saying import line
from benchmarks.suites import SUITES
from tests.benchmarks import played
from tests.benchmarks.ended import status_of
from tests.benchmarks.played import HERE, endings, stand_in

ROOT = Path(__file__).parents[2]


def benchmarks(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("suite", SUITES)
def test_cases_survive_json_and_have_keys_of_their_own(suite: str) -> None:
    cases = in_rounds(list(SUITES[suite]()), 2)
    assert [from_json(json.loads(json.dumps(case.as_json()))) for case in cases] == cases
    assert len({case.key for case in cases}) == len(cases)


def test_rounds_are_interleaved() -> None:
    first, second = Case("resnet50", "plain"), Case("resnet50", "checkpoint")
    found = in_rounds([first, second], 2)
    assert [(case.method, case.round) for case in found] == [
        ("plain", 0),
        ("checkpoint", 0),
        ("plain", 1),
        ("checkpoint", 1),
    ]


def test_only_neighbours_that_may_share_a_process_do() -> None:
    alone = Case("resnet50", "plain")
    shared = [Case("resnet50", m, "own", shared=True) for m in ("belady:auto", "belady:floor")]
    other = Case("vgg19", "belady:auto", "own", shared=True)
    assert list(grouped([alone, alone, *shared, other])) == [[alone], [alone], shared, [other]]


def test_a_cap_is_found_before_what_needs_it() -> None:
    toy: dict[str, Any] = {"device": "cpu", "toy": True}
    plain = Case("resnet50", "plain", **toy)
    first = Case("resnet50", "belady:auto", "100%:checkpoint", shared=True, **toy)
    second = Case("resnet50", "belady:auto", "50%:save_on_cpu", shared=True, **toy)
    listed = Case("resnet50", "save_on_cpu", "smallest", equal_steps=6, round=1, **toy)
    added = Case("resnet50", "checkpoint", "smallest", **toy)
    cases = [plain, first, second, listed]
    assert sweep.after_bases(cases, {}) == [plain, added, first, listed, second]
    assert sweep.after_bases(cases, {first.cap_of("checkpoint")}) == [plain, first, listed, second]
    assert first.together == second.together != replace(first, budget="smallest").together


def test_what_is_compiled_has_a_process_of_its_own() -> None:
    methods = ("belady-graph:auto", "belady-graph:floor", "belady:auto", "bound")
    ours = [Case("resnet50", method, "50%", shared=True) for method in methods]
    assert list(grouped(ours)) == [ours[:2], ours[2:]]


def test_only_bounds_share_a_process_in_a_frontier() -> None:
    parser = argparse.ArgumentParser()
    frontier.add_arguments(parser)
    cases = list(frontier.cases(parser.parse_args(["out", "--rounds", "1"])))
    bounds = [case for case in cases if case.method == "bound"]
    of_caps = [case for case in bounds if case.peer]
    others = [case for case in bounds if not case.peer]
    assert min(len(others), len(of_caps)) > 1
    assert [group for group in grouped(cases) if len(group) > 1] == [others, of_caps]


def test_a_cap_of_another_setting_is_another() -> None:
    case = Case("resnet50", "belady:auto", "100%:checkpoint")
    found = Case("resnet50", "checkpoint", "smallest", "tf32", repeats=3, equal_steps=6, round=2)
    record = found.as_json() | {"outcome": "ok", "budget_bytes": 5}
    failed = found.as_json() | {"outcome": "out of memory", "round": 3}
    assert records.bases([failed, record, failed]) == {case.cap_of("checkpoint"): 5}
    assert replace(case, precision="bf16").cap_of("checkpoint") not in records.bases([record])
    assert records.bases([failed]) == {case.cap_of("checkpoint"): None}


@pytest.mark.timeout(300)
def test_all_of_it_at_toy_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    arguments = (
        "frontier", out, "--toy", "--workload", "vgg19", "--precision", "fp32", "--ladder", 95, 91,
        "--peer", "checkpoint", "--peer", "trl", "--repeats", 2, "--rounds", 1, "--share-process",
    )  # fmt: skip
    benchmarks(*arguments)
    found = records.read(out)
    outcomes = {(r["method"], r["budget"]): r["outcome"] for r in found}
    assert outcomes.pop(("trl", "smallest")) == "absent"
    assert set(outcomes.values()) == {"ok"}, found
    # At its smallest cap ours runs modules in slices, which it says.
    assert all(r["equal"] != bool(r.get("numerics")) for r in found if "equal" in r)
    assert any(r.get("numerics") == ["sections"] for r in found)
    _capped_cases_keep_to_their_caps(found, 5)
    assert {point.series for point in points([r for r in found if r["outcome"] == "ok"])} == {
        "plain", "belady:auto", "belady:auto, in slices", "bound (eager, uncut)", "checkpoint",
    }  # fmt: skip
    _ours_ran_at_the_peers_cap(found)
    assert status_of(["plot", str(out), "-o", str(tmp_path / "out.svg")], monkeypatch) == 0
    assert status_of([*map(str, arguments)], monkeypatch) == 0
    again = capsys.readouterr().out
    assert "are on record" in again
    assert "left out, as there is no cap of trl: vgg19" in again
    assert records.read(out) == found


@pytest.mark.timeout(240)
def test_the_suite_of_toys(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    benchmarks("run", out, "--suite", "toy", "--rounds", 1)
    found = records.read(out)
    assert {record["outcome"] for record in found} == {"ok"}, found
    assert len(found) == len(list(SUITES["toy"]()))
    assert {record["workload"] for record in found} == {"resnet50", "gpt2"}
    assert all(record["equal"] for record in found if "equal" in record)
    assert any("equal" in record for record in found if record["method"] == "belady:floor")
    _capped_cases_keep_to_their_caps(found, sum(it.budget != "none" for it in SUITES["toy"]()))


def _ours_ran_at_the_peers_cap(found: list[dict[str, Any]]) -> None:
    caps = {(r["method"], r["budget"]): r.get("budget_bytes") for r in found}
    assert caps["belady:auto", "100%:checkpoint"] == caps["checkpoint", "smallest"]
    assert ("belady:auto", "100%:trl") not in caps


def test_a_peer_is_measured_where_its_cap_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def ending(_case: Case, known: Any) -> dict[str, Any]:
        told.append(dict(known["bases"]))
        return {"outcome": "ok", "budget_bytes": 7}

    endings(ending, monkeypatch)
    case = Case("vgg19", "belady:auto", "50%:checkpoint", device="cpu")
    arguments = played.arguments(tmp_path)
    for _ in range(2):
        sweep.execute([case], arguments, 60)
    first, second = records.read(arguments.out)
    assert (first["method"], first["budget"]) == ("checkpoint", "smallest")
    assert from_json(second) == case
    assert told == [{}, {case.cap_of("checkpoint"): 7}]


def test_what_another_machine_measured_is_measured_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def measured(
        cases: list[Case], known: Any, _seconds: float, keep: Any, _gpu: Any
    ) -> tuple[Any, Any]:
        asked.append(cases[0].method)
        assert known["references"] == {}
        assert 5 not in known["bases"].values()
        if cases[0].method == "plain":
            return cases, "the process ended with -9"
        keep(cases[0].as_json() | HERE | {"outcome": "ok", "budget_bytes": 7})
        return cases[1:], None

    stand_in(measured, monkeypatch)
    cases = [
        Case("vgg19", "checkpoint", "smallest", device="cpu"),
        Case("vgg19", "plain", device="cpu"),
    ]
    arguments = played.arguments(tmp_path)
    others = [HERE | {"torch": "1"}, HERE | {"device_name": "another"}, {}]
    cap = {"outcome": "ok", "budget_bytes": 5, "plain_digest": "of elsewhere"}
    records.write(arguments.out, [case.as_json() | it | cap for it in others for case in cases])
    sweep.execute(cases, arguments, 60)
    assert "2 of 2 are on record" in capsys.readouterr().out
    assert asked == ["checkpoint", "plain"]
    assert all(HERE.items() <= it.items() for it in records.read(arguments.out)[-2:])
    sweep.execute(cases, arguments, 60)
    assert asked == ["checkpoint", "plain"]


def test_what_other_files_hold_of_this_machine_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def ending(case: Case, known: Any) -> dict[str, Any]:
        told.append((case, dict(known["bases"]), dict(known["references"])))
        return {"outcome": "ok"}

    endings(ending, monkeypatch)
    cap = Case("vgg19", "checkpoint", "smallest", device="cpu")
    plain = Case("vgg19", "plain", device="cpu")
    ours = Case("vgg19", "belady:auto", "50%:checkpoint", device="cpu")
    known = [tmp_path / "one.jsonl", tmp_path / "other.jsonl"]
    records.write(known[0], [cap.as_json() | HERE | {"outcome": "ok", "budget_bytes": 7}])
    digest = HERE | {"outcome": "ok", "plain_digest": "bits"}
    elsewhere = cap.as_json() | HERE | {"torch": "1", "outcome": "ok", "budget_bytes": 5}
    records.write(known[1], [plain.as_json() | digest, elsewhere])
    arguments = played.arguments(tmp_path, known)
    sweep.execute([cap, plain, ours], arguments, 60)
    ((case, caps, references),) = told
    assert case == ours
    assert caps == {ours.cap_of("checkpoint"): 7}
    assert references[ours.reference]["plain_digest"] == "bits"
    assert [from_json(it) for it in records.read(arguments.out)] == [ours]


def test_several_at_once_wait_for_caps_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap = Case("vgg19", "checkpoint", "smallest", device="cpu")
    plain = Case("vgg19", "plain", device="cpu")
    ours = Case("vgg19", "belady:auto", "50%:checkpoint", device="cpu")
    other = Case("alexnet", "plain", device="cpu")
    both, going = threading.Barrier(2, timeout=20), threading.Event()
    begun: list[tuple[Case, bool]] = []

    def ending(case: Case, _known: Any) -> dict[str, Any]:
        begun.append((case, going.is_set()))
        if case == cap:
            both.wait()  # for plain, which needs no cap
            time.sleep(0.2)
            going.set()
        elif case == plain:
            both.wait()
        return {"outcome": "ok", "budget_bytes": 7}

    endings(ending, monkeypatch)
    arguments = played.arguments(tmp_path, at_once=2)
    assert sweep.execute([cap, ours, plain, other], arguments, 60) == 0
    found = records.read(arguments.out)
    assert {from_json(it) for it in found} == {cap, plain, ours, other}
    assert all(it["at_once"] == 2 for it in found)
    assert dict(begun)[ours]
    assert not dict(begun)[plain]


@pytest.mark.parametrize("at_once", [1, 2])
def test_what_goes_wrong_ends_a_sweep(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def measured(cases: list[Case], *_: Any) -> tuple[Any, None]:
        begun.append(cases)
        if len(begun) > 1:
            time.sleep(0.5)
            return [], None
        raise ValueError("the disk is full")

    stand_in(measured, monkeypatch)
    cases = [Case("vgg19", "plain", device="cpu", round=number) for number in range(9)]
    with pytest.raises(ValueError, match="the disk is full"):
        sweep.execute(cases, played.arguments(tmp_path, at_once=at_once), 60)
    assert len(begun) <= at_once


def test_each_of_several_at_once_has_a_gpu_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, seen = threading.Barrier(2, timeout=20), []

    def measured(_cases: Any, _known: Any, _s: float, _keep: Any, gpu: Any) -> tuple[Any, None]:
        both.wait()
        seen.append(gpu)
        return [], None

    stand_in(measured, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    cases = [Case("vgg19", "plain", round=number) for number in range(2)]
    sweep.execute(cases, played.arguments(tmp_path, at_once=2), 60)
    assert sorted(seen) == ["3", "5"]
    with pytest.raises(GivenError, match="at most 2"):
        sweep.execute(cases, played.arguments(tmp_path, at_once=3), 60)


def test_a_case_for_which_too_little_time_is_left_makes_way_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = HERE | {"device": "cpu", "outcome": "ok"}
    begun = []

    def measured(cases: list[Case], *_: Any) -> tuple[Any, None]:
        begun.extend(cases)
        return [], None

    stand_in(measured, monkeypatch)
    known = tmp_path / "known.jsonl"
    took = {"vgg19": (1.0, 1000.0, 1000.0), "alexnet": (1000.0, 1.0, 1.0, 1.0)}
    records.write(
        known,
        [
            Case(net, "plain", device="cpu", round=number).as_json()
            | about
            | {"wall_seconds": it, "peak_allocated_bytes": 100}
            for net, all_of_it in took.items()
            for number, it in enumerate(all_of_it)
        ],
    )
    cases = [Case(net, "checkpoint", device="cpu") for net in took]
    # One whose like took that long, and of two that share a process the second.
    cases.append(Case("alexnet", "plain", device="cpu", round=3))
    both = [
        Case("alexnet", "belady:auto", share, device="cpu", shared=True) for share in ("9%", "8%")
    ]
    slow = both[0].as_json() | about | {"wall_seconds": 1000.0}
    records.append(known, replace(both[0], round=1).as_json() | slow | {"round": 1})
    sweep.execute([*cases, *both], played.arguments(tmp_path, [known]), 60)
    assert begun == [cases[1], both[1]]


def test_without_a_device_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = played.arguments(tmp_path)
    assert sweep.execute([Case("vgg19", "plain")], arguments, 60) == 2
    assert "--toy" in capsys.readouterr().out
    assert not arguments.out.exists()


def test_a_line_says_what_is_known() -> None:
    case = Case("vgg19", "bound", "4GiB").as_json()
    assert line(case | {"outcome": "ok", "bound_seconds": 0.5, "budget_bytes": 4 << 30}) == (
        "vgg19 bound 4GiB tf32 ok: bound 500 ms, budget 4.00 GiB"
    )
    crash = line(case | {"outcome": "crash", "error": "Traceback\n  line\nValueError: no\n"})
    assert crash == "vgg19 bound 4GiB tf32 crash: ValueError: no"


def test_the_page_names_every_suite() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    assert all(f"| `{name}` |" in text for name in SUITES)


def _capped_cases_keep_to_their_caps(found: list[dict[str, Any]], least: int) -> None:
    capped = [r for r in found if r.get("budget_bytes") and "peak_allocated_bytes" in r]
    assert len(capped) >= least
    assert all(record["peak_allocated_bytes"] <= record["budget_bytes"] for record in capped)
