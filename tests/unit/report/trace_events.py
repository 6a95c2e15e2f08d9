"""What the Trace Event Format asks of events, and how Perfetto reads them."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

Event = dict[str, Any]

KEYS = {
    "X": {"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "cat", "name", "pid", "tid", "ts", "args"},
    "M": {"ph", "name", "pid", "tid", "args"},
    "s": {"ph", "cat", "name", "pid", "tid", "ts", "id"},
    "t": {"ph", "cat", "name", "pid", "tid", "ts", "id", "bp"},
    "f": {"ph", "cat", "name", "pid", "tid", "ts", "id", "bp"},
}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def events_of(content: bytes) -> list[Event]:
    """Events of a trace, every one of which is well formed."""
    document = json.loads(content.decode("ascii"), parse_constant=_no_constant)
    assert document["displayTimeUnit"] == "ms"
    events: list[Event] = document["traceEvents"]
    for event in events:
        _well_formed(event)
    _arrows_are_bound(events)
    return events


def ours(events: list[Event], process: str = "predicted") -> dict[str, list[Event]]:
    """Complete events of one of our processes by track."""
    pid = pid_of(events, process)
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "thread_name" and event["pid"] == pid
    }
    tracks: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X" and event.get("pid") == pid:
            tracks[names[event["tid"]]].append(event)
    return tracks


def pid_of(events: list[Event], process: str) -> int:
    """Number of one of our processes."""
    (pid,) = (
        event["pid"]
        for event in events
        if event["name"] == "process_name" and event["args"]["name"] == f"belady: {process}"
    )
    return int(pid)


def counters(events: list[Event], process: str = "predicted") -> dict[str, dict[float, int]]:
    """Bytes by microsecond of each counter of one of our processes."""
    pid = pid_of(events, process)
    found: dict[str, dict[float, int]] = defaultdict(dict)
    for event in events:
        if event["ph"] == "C" and event["pid"] == pid:
            assert event["ts"] not in found[event["name"]]
            found[event["name"]][event["ts"]] = event["args"]["bytes"]
    return found


def threads_are_stacks(events: list[Event]) -> None:
    """On a thread no event overlaps another one, in the whole nanoseconds that Perfetto keeps."""
    free_at: dict[tuple[int, int], int] = defaultdict(int)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        key = event["pid"], event["tid"]
        start, duration = int(event["ts"] * 1000.0), int(event["dur"] * 1000.0)
        assert start >= free_at[key]
        free_at[key] = start + duration


def _well_formed(event: Event) -> None:
    assert event.keys() == KEYS[event["ph"]]
    assert isinstance(event["name"], str)
    assert event["name"]
    for key in ("pid", "tid"):
        assert type(event[key]) is int
        assert 0 < event[key] < 2**32
    if event["ph"] == "M":
        assert event["name"] in METADATA
        return
    assert type(event["ts"]) is float
    assert event["ts"] >= 0
    assert event.get("dur", 0) >= 0
    for argument in event.get("args", {}).values():
        assert type(argument) in (int, str)
        assert event["ph"] != "C" or (type(argument) is int and argument >= 0)


def _arrows_are_bound(events: list[Event]) -> None:
    """Each end follows the event that it is bound to; each arrow starts once and goes forward."""
    at: dict[int, float] = {}
    ended: set[int] = set()
    bound: Event = {}
    for event in events:
        if event["ph"] == "X":
            bound = event
        if event["ph"] not in "stf":
            continue
        assert {key: event[key] for key in ("pid", "tid", "ts")} == {
            key: bound[key] for key in ("pid", "tid", "ts")
        }
    for event in sorted((e for e in events if e["ph"] in "stf"), key=lambda e: e["ts"]):
        assert (event["id"] in at) == (event["ph"] != "s")
        assert event["id"] not in ended
        assert at.get(event["id"], 0.0) <= event["ts"]
        at[event["id"]] = event["ts"]
        if event["ph"] == "f":
            ended.add(event["id"])
    assert ended == at.keys()


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")
