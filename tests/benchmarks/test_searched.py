"""A smallest cap is found in one process and measured in another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records, sweep
from benchmarks.cases import FOUND, Case
from tests.benchmarks import played
from tests.benchmarks.played import HERE, stand_in

CAP = Case("vgg19", "checkpoint", "smallest", device="cpu")
SEARCH = {"outcome": FOUND, "budget_bytes": 7, "trials": [[7, None]], "wall_seconds": 100.0}


def _played(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Case, dict[str, int]]]:
    """Processes that search where no cap is told, and else measure; what they were told."""
    told: list[tuple[Case, dict[str, int]]] = []

    def measured(
        cases: list[Case], known: Any, _seconds: float, keep: Any, _gpu: Any
    ) -> tuple[list[Case], None]:
        case, *others = cases
        told.append((case, dict(known["bases"])))
        cap = known["bases"].get(case.cap_of(case.method))
        searches = case.budget == "smallest" and cap is None
        ended = SEARCH if searches else {"outcome": "ok", "budget_bytes": cap, "wall_seconds": 9.0}
        keep(case.as_json() | HERE | ended)
        return [*others, case] if searches else others, None

    stand_in(measured, monkeypatch)
    return told


def test_in_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, measure = [], sweep.measure

    def counted(*given: Any) -> Any:
        begun.append(given[0])
        return measure(*given)

    monkeypatch.setattr(sweep, "measure", counted)
    case = Case("vgg19", "checkpoint", "smallest", device="cpu", toy=True, repeats=2)
    sweep.execute([case], played.arguments(tmp_path), 200)
    search, found = records.read(tmp_path / "out.jsonl")
    assert begun == [[case], [case]]
    assert (search["outcome"], found["outcome"]) == (FOUND, "ok")
    assert "seconds" not in search
    assert len(found["seconds"]) == 2 * len(found["rows"]) > 2
    assert found["trials"] == search["trials"]
    assert found["budget_bytes"] == search["budget_bytes"]
    assert found["wall_seconds"] > search["wall_seconds"]


def test_a_cap_that_is_found_is_measured_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, other = _played(monkeypatch), Case("vgg19", "plain", device="cpu")
    sweep.execute([CAP, other], played.arguments(tmp_path), 200)
    assert told == [
        (CAP, {}),
        (CAP, {CAP.cap_of("checkpoint"): 7}),
        (other, {CAP.cap_of("checkpoint"): 7}),
    ]
    *_, found, _ = records.read(tmp_path / "out.jsonl")
    assert (found["outcome"], found["wall_seconds"]) == ("ok", 109.0)
    assert found["trials"] == SEARCH["trials"]


def test_a_search_that_ended_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, out = _played(monkeypatch), tmp_path / "out.jsonl"
    # Had it to be searched for again, the time would not do.
    before = CAP.as_json() | HERE | {"round": 1, "outcome": "ok", "wall_seconds": 500.0}
    quick = Case("vgg19", "plain", device="cpu").as_json() | HERE
    quick |= {"outcome": "ok", "wall_seconds": 9.0}
    slow = before | {"budget_bytes": None, "outcome": "out of memory"}
    records.write(out, [slow, quick, quick | {"round": 1}, CAP.as_json() | HERE | SEARCH])
    another = replace(CAP, round=2, precision="fp32")
    sweep.execute([CAP, another], played.arguments(tmp_path), 60)
    assert told == [(CAP, {CAP.cap_of("checkpoint"): 7})]
    assert records.read(out)[-1]["trials"] == SEARCH["trials"]


def test_a_cap_found_on_another_machine_than_the_first_is_measured_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = _played(monkeypatch)
    monkeypatch.setattr(sweep, "here", lambda _device: HERE | {"device_name": "the first one"})
    sweep.execute([CAP], played.arguments(tmp_path), 200)
    assert [caps for _, caps in told] == [{}, {CAP.cap_of("checkpoint"): 7}]


def test_a_cap_that_others_need_is_measured_where_it_is_only_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told, out = _played(monkeypatch), tmp_path / "out.jsonl"
    records.write(out, [CAP.as_json() | HERE | SEARCH])
    ours = Case("vgg19", "belady:auto", "50%:checkpoint", device="cpu")
    sweep.execute([ours], played.arguments(tmp_path), 200)
    assert [case.method for case, _ in told] == ["checkpoint", "belady:auto"]
    assert "on record" not in capsys.readouterr().out


def test_searches_of_other_cases_are_not_told_with_a_cap(tmp_path: Path) -> None:
    other = Case("vgg16", "checkpoint", "smallest", device="cpu")
    record = CAP.as_json() | HERE | {"outcome": "ok", "budget_bytes": 8, "wall_seconds": 2.0}
    assert records.with_search(record, [other.as_json() | HERE | SEARCH]) == record
    told = records.with_search(record, [CAP.as_json() | HERE | SEARCH])
    assert told == record | {"trials": SEARCH["trials"], "wall_seconds": 102.0}


@pytest.mark.parametrize(
    ("outcomes", "holds"),
    [
        (("found", "crash"), "crash"),
        (("crash", "found"), "crash"),
        (("crash", "ok"), "ok"),
        (("ok", "found"), "ok"),
        (("found", "infeasible"), "infeasible"),
    ],
)
def test_which_of_two_records_holds(outcomes: tuple[str, str], holds: str, tmp_path: Path) -> None:
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path, outcome in zip(paths, outcomes, strict=True):
        records.write(path, [CAP.as_json() | HERE | SEARCH | {"outcome": outcome}])
    assert [it["outcome"] for it in records.merge(paths)] == [holds]


def test_what_is_only_found_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = CAP.as_json() | HERE | SEARCH
    result = CAP.as_json() | HERE | {"outcome": "ok", "budget_bytes": 8}
    records.write(tmp_path / "one.jsonl", [search])
    records.write(tmp_path / "two.jsonl", [result])
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    assert records.merge(paths) == [result]
    assert records.merge(paths[:1]) == [search]
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert records.committed() == [result]


def test_of_shares_of_caps_the_largest_budget_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, out = _played(monkeypatch), tmp_path / "out.jsonl"
    caps = {"checkpoint": 50, "save_on_cpu": 10, "checkpoint+save_on_cpu": 30}
    for peer, cap in caps.items():
        case = Case("vgg19", peer, "smallest", device="cpu")
        records.append(out, case.as_json() | HERE | {"outcome": "ok", "budget_bytes": cap})
    budgets = ["100%:checkpoint", "100%:save_on_cpu", "100%:checkpoint+save_on_cpu"]
    budgets += ["50%:checkpoint"]
    cases = [Case("vgg19", "belady:auto", it, device="cpu", shared=True) for it in budgets]
    sweep.execute(cases, played.arguments(tmp_path), 200)
    assert [case.budget for case, _ in told] == [budgets[at] for at in (0, 2, 3, 1)]
