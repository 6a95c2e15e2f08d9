"""The verb that draws a frontier."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from belady.report import ink
from belady.report.plots import Kind, Point, frontier, save_figure
from benchmarks import plot, records
from benchmarks.cases import OURS, OWN
from benchmarks.comparison import plotted
from benchmarks.suites import PEER_NAMES, POLICIES
from tests.benchmarks.ended import status_of
from tests.benchmarks.test_figures import record

HERE = [record("checkpoint", 5, 0.1), record("belady:auto", 4, 0.2)]
POINTS = plot.points(HERE)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"sizes": {"batch": 128}}, "resnet50, batch 128, bf16"),
        ({"device_name": "another"}, "resnet50, bf16, another, torch 2"),
        ({"torch": "3"}, "resnet50, bf16, a device, torch 3"),
        ({"channels_last": True}, "resnet50, bf16, channels_last"),
        ({"toy": True}, "resnet50, bf16, toy size"),
        ({"precision": "tf32"}, "resnet50, tf32"),
        ({"workload": "vit"}, "vit, bf16"),
    ],
)
def test_a_figure_is_of_one_setting_on_one_machine(
    other: dict[str, Any],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "points", lambda found: drawn.extend(found) or POINTS)
    there = [{**it, **other} for it in HERE]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.svg"
    records.write(source, [*HERE, *there])
    command = ["plot", str(source), "-o", str(out)]
    assert status_of(command, monkeypatch) == 2
    assert f"\n  {name!r}" in capsys.readouterr().err
    assert status_of([*command, "--setting", "another"], monkeypatch) == 2
    assert not out.exists()
    assert status_of([*command, "--setting", name], monkeypatch) == 0
    assert drawn == there
    assert out.exists()


def test_every_method_has_a_look_of_its_own_in_grey() -> None:
    peers = [ink.look(plot.LOOKS[name], ours=False) for name in PEER_NAMES]
    names = {*POLICIES, *(f"{engine}auto" for engine in OWN), f"{OURS}auto, in slices"}
    ours = [ink.look(plot.LOOKS[name], ours=True) for name in names]
    looks = {(it["marker"], it["fillstyle"], str(it["linestyle"])) for it in (*peers, *ours)}
    assert len(looks) == len(peers) + len(ours)
    # One point has no line.
    assert len({look[:2] for look in looks}) == len(looks)


def test_what_ran_in_slices_is_another_series_and_no_bound_hides_it() -> None:
    cut = record("belady:auto", 3, 0.3, numerics=["sections"])
    bounds = [bound(2, None), bound(4, None), bound(5, 0.05)]
    found = [(it.series, it.nbytes >> 30) for it in plot.points([*HERE, cut, *bounds])]
    assert found == [
        ("belady:auto", 4),
        ("belady:auto, in slices", 3),
        ("checkpoint", 5),
        ("bound (eager, uncut)", 2),
        ("bound (eager, uncut)", 5),
    ]
    assert len(plot.points([*HERE, *bounds])) == 5


def bound(cap: int, seconds: float | None) -> dict[str, Any]:
    return record("bound", cap, 0.0, bound_seconds=seconds)


def test_what_flushed_has_not_passed() -> None:
    flushed = record("belady:auto", 3, 0.3, allocation_retries=2)
    assert [it.passed for it in plot.points([*HERE, flushed])] == [True, False, True]


def test_one_method_alone_makes_no_figure() -> None:
    alone = [record("plain", 5, 0.1), record("plain", 6, 0.1), bound(4, 0.05)]
    assert not list(plotted([*alone, record("belady:auto", 4, 0.0, outcome="out of memory")]))
    assert len(list(plotted([*alone, record("belady:auto", 4, 0.1)]))) == 1


def test_a_file_says_what_it_shows(tmp_path: Path) -> None:
    drawn = [*POINTS, Point("a bound", 1, math.inf, Kind.BOUND)]
    path = tmp_path / "out.svg"
    save_figure(frontier(drawn), path, description=plot.described(drawn))
    assert plot.description_of(path) == plot.described(drawn)
    assert json.loads(plot.described(drawn))[-1] == ["a bound", "bound", 1, None, True]
    save_figure(frontier(drawn), path)
    assert plot.description_of(path) is None
    path.write_text("cut off")
    assert plot.description_of(path) is None
