"""Beside torch.profiler's events: no number is shared, one clock, nothing of theirs is lost."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from belady.errors import DocumentError
from belady.report.chrome import chrome_trace
from belady.report.merge import read_profile
from tests.unit.report.drawn import recorded, run_of
from tests.unit.report.trace_events import Event, ours, pid_of, threads_are_stacks

BASE = 4410709528863.505


def step(number: int, ts: float) -> Event:
    name = f"ProfilerStep#{number}"
    return {"ph": "X", "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": 5.0, "args": {}}


def metadata() -> Event:
    return {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 1.0, "args": {"name": "p"}}


def write(path: Path, *events: Any, **more: object) -> Path:
    path.write_text(json.dumps({"traceEvents": list(events), **more}))
    return path


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch.profiler writes for two of four steps."""
    path = tmp_path_factory.mktemp("profile") / "profile.json.gz"
    layer = torch.nn.Linear(8, 8)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(4):
            layer(torch.ones(4, 8)).sum().backward()
            profiler.step()
    return path


def begin(content: bytes) -> float:
    tracks = ours(json.loads(content)["traceEvents"])
    return min(event["ts"] for event in tracks["host"])


def test_a_real_profile_keeps_every_event_and_the_iteration_begins_with_a_step(real: Path) -> None:
    theirs = json.loads(gzip.decompress(real.read_bytes()))
    run = recorded()
    for number in (None, 2, 3):
        content = chrome_trace(run, read_profile(real), number)
        both = json.loads(content)
        count = len(theirs["traceEvents"])
        assert both["traceEvents"][:count] == theirs["traceEvents"]
        assert {key: both[key] for key in theirs if key != "traceEvents"} == {
            key: theirs[key] for key in theirs if key != "traceEvents"
        }
        mine = both["traceEvents"][count:]
        threads_are_stacks(mine)
        assert all(event.get("ts", 0.0) * 8 % 1 == 0 for event in mine)
        name = f"ProfilerStep#{number or 2}"
        (moment,) = (e["ts"] for e in theirs["traceEvents"] if e["name"] == name)
        assert begin(content) == pytest.approx(moment, abs=0.125)
        taken = {event.get(key) for event in theirs["traceEvents"] for key in ("pid", "tid", "id")}
        used = {event[key] for event in mine for key in ("pid", "tid", "id") if key in event}
        assert not taken & used
        assert {pid_of(mine, "predicted"), pid_of(mine, "measured")} <= used


def test_alone_and_beside_the_events_are_the_same(real: Path) -> None:
    run = run_of()
    alone = ours(json.loads(chrome_trace(run))["traceEvents"])
    beside = ours(json.loads(chrome_trace(run, read_profile(real)))["traceEvents"])
    strip = ("name", "dur", "args")
    assert {
        track: [[e[key] for key in strip] for e in found] for track, found in alone.items()
    } == {track: [[e[key] for key in strip] for e in found] for track, found in beside.items()}


def test_numbers_in_use_are_left_out(tmp_path: Path) -> None:
    free = 10**9
    events = [
        {"ph": "X", "name": "a", "pid": free, "tid": str(free + 1), "ts": 1.0, "dur": 1.0},
        {"ph": "s", "name": "b", "pid": "Spans", "tid": -1, "ts": 1.0, "id": free + 2},
    ]
    content = chrome_trace(run_of(), read_profile(write(tmp_path / "p.json", *events)))
    mine = json.loads(content)["traceEvents"][2:]
    used = {event[key] for event in mine for key in ("pid", "tid", "id") if key in event}
    assert min(used) == free + 3


@pytest.mark.parametrize(
    ("events", "moment"),
    [
        ([metadata(), step(4, BASE + 9), step(3, BASE)], BASE + 0.0),
        ([step(3, BASE + 5), step(3, BASE)], BASE),
        ([step(3, BASE), step(3, BASE + 5)], BASE),
        ([{"ph": "i", "name": "x", "ts": 2.0}, {"ph": "i", "name": "x", "ts": 3.0}], 2.0),
        ([metadata(), {"ph": "i", "name": "x", "ts": 12.0, "s": "g"}], 12.0),
        ([{"ph": "X", "name": 5, "ts": "soon"}, {"ph": "X", "name": "", "ts": -4.0}], -4.0),
        ([], 0.0),
    ],
)
def test_the_iteration_begins_with_the_first_step_or_event(
    events: list[Event], moment: float, tmp_path: Path
) -> None:
    profiled = read_profile(write(tmp_path / "p.json", *events))
    assert begin(chrome_trace(run_of(), profiled)) == pytest.approx(moment, abs=0.0625)


def test_a_step_that_is_not_there_is_refused(tmp_path: Path) -> None:
    profiled = read_profile(write(tmp_path / "p.json", step(3, 1.0), step(4, 2.0)))
    with pytest.raises(DocumentError, match="no ProfilerStep#9; its steps: 3, 4"):
        chrome_trace(run_of(), profiled, 9)


def test_the_array_format_and_what_json_cannot_hold_are_read(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('[{"ph": "X", "ts": 1, "dur": 1, "args": {"a": NaN, "b": 1e999, "c": 0.1}}]')
    both = json.loads(chrome_trace(run_of(), read_profile(path)), parse_constant=pytest.fail)
    assert both["traceEvents"][0]["args"] == {"a": "NaN", "b": "1e999", "c": 0.1}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"not json", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"{}", "not a Chrome trace"),
        (b"7", "not a Chrome trace"),
        (b'{"traceEvents": {}}', "not a Chrome trace"),
        (b'{"traceEvents": [1]}', r"traceEvents\[0\] is not an object"),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(DocumentError, match=rf"p\.json: {what}.*; give what torch.profiler"):
        read_profile(path)


def test_what_is_no_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json.gz"
    for content in (b"[]", gzip.compress(b"[]" * 1000)[:-9]):
        path.write_bytes(content)
        with pytest.raises(DocumentError, match="not gzip"):
            read_profile(path)


def test_what_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belady.report.merge._LARGEST_BYTES", 100)
    path = tmp_path / "p.json.gz"
    path.write_bytes(gzip.compress(b" " * 99 + b"[]"))
    with pytest.raises(DocumentError, match="more than 100 bytes"):
        read_profile(path)
