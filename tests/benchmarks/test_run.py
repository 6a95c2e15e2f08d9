"""Cases: rounds, processes, records, and all of it once in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from benchmarks.cases import Case, from_json, key_of
from benchmarks.plot import points
from benchmarks.processes import grouped, measure
from benchmarks.run import in_rounds
from benchmarks.suites import SUITES

ROOT = Path(__file__).parents[2]


def benchmarks(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
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


def test_records_of_before_there_were_keys_are_read_and_merged(tmp_path: Path) -> None:
    old = sorted(records.RESULTS.glob("*-engine.jsonl"))[0]
    assert all(key_of(record) is None for record in records.read(old))
    assert records.merge([old]) == records.read(old)


def test_half_a_line_is_not_a_record(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    records.append(path, {"a": 1})
    path.write_text(path.read_text() + '{"b": ')
    assert records.read(path) == [{"a": 1}]
    records.append(path, {"c": 2})
    assert records.read(path) == [{"a": 1}, {"c": 2}]


def test_a_crash_gives_way_to_a_result(tmp_path: Path) -> None:
    case = Case("resnet50", "plain").as_json()
    paths = [tmp_path / "a", tmp_path / "b"]
    records.write(paths[0], [case | {"outcome": "crash"}])
    records.write(paths[1], [case | {"outcome": "ok"}])
    assert records.merge(paths) == [case | {"outcome": "ok"}]


def test_a_process_that_is_killed_says_so() -> None:
    case = Case("resnet50", "plain", device="cpu", toy=True)
    kept: list[Any] = []
    left, ended = measure([case], {}, 0.1, kept.append)
    assert left == [case]
    assert kept == []
    assert "-9" in str(ended)


def test_all_of_it_at_toy_size(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = (
        "frontier", out, "--toy", "--workload", "vgg19", "--precision", "fp32", "--ladder", 95, 91,
        "--peer", "checkpoint", "--peer", "trl", "--repeats", 2, "--share-process",
    )  # fmt: skip
    benchmarks(*arguments)
    found = records.read(out)
    outcomes = {(r["method"], r["budget"]): r["outcome"] for r in found}
    assert outcomes.pop(("trl", "smallest")) == "absent"
    assert set(outcomes.values()) == {"ok"}, found
    # At its smallest cap ours runs modules in slices, which it says.
    assert all(r["equal"] != bool(r.get("numerics")) for r in found if "equal" in r)
    assert any(r.get("numerics") == ["sections"] for r in found)
    _capped_cases_keep_to_their_caps(found)
    assert {point.series for point in points([r for r in found if r["outcome"] == "ok"])} == {
        "plain", "belady:auto", "bound", "checkpoint",
    }  # fmt: skip
    benchmarks("plot", out, "-o", tmp_path / "out.svg")
    assert "are in" in benchmarks(*arguments)
    assert records.read(out) == found


def _capped_cases_keep_to_their_caps(found: list[dict[str, Any]]) -> None:
    capped = [r for r in found if r.get("budget_bytes") and "peak_allocated_bytes" in r]
    assert len(capped) > 4
    assert all(record["peak_allocated_bytes"] <= record["budget_bytes"] for record in capped)
