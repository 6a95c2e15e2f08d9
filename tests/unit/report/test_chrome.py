"""Chrome traces: well formed, true to the run, and readable whatever the names are."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from belady.ir.plan import Assignment, Encode
from belady.ir.run import Run
from belady.ir.timeline import Held, Lane, Span
from belady.ir.trace import Tier
from belady.report.chrome import chrome_trace
from belady.simulate import simulate
from tests.unit.report.drawn import BUDGET, CPU, MIB, recorded, run_of, runs, staged
from tests.unit.report.trace_events import (
    Event,
    counters,
    events_of,
    ours,
    pid_of,
    threads_are_stacks,
)


@given(runs())
def test_any_run_is_well_formed_and_no_event_overlaps(run: Run) -> None:
    events = events_of(chrome_trace(run))
    threads_are_stacks(events)
    tracks = ours(events)
    assert len(tracks["compute"]) == len(run.trace.ops)
    # What takes the host no time is not there.
    issued = sum(op.host_seconds > 0 or run.trace.device == "cpu" for op in run.trace.ops)
    assert len(tracks.get("host", ())) == issued
    copies = sum(
        len(tracks.get(lane.value, ())) for lane in Lane if lane not in ("host", "compute")
    )
    assert copies == sum(moved.copies for moved in run.predicted.moved)


@given(runs())
def test_work_and_stalls_fill_the_iteration(run: Run) -> None:
    tracks = ours(events_of(chrome_trace(run)))
    pieces = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in [*tracks["compute"], *tracks.get("stall", ())]
    )
    # Each end is rounded to an eighth of a microsecond.
    assert pieces[0][0] <= 0.125
    assert all(abs(now[0] - before[1]) <= 0.25 for before, now in pairwise(pieces))
    assert pieces[-1][1] == pytest.approx(run.predicted.seconds * 1e6, abs=0.125)
    assert len(tracks.get("stall", ())) == len(run.predicted.stalls)


def test_tracks_are_named_and_in_order() -> None:
    events = events_of(chrome_trace(staged()))
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    shown = [names[tid] for tid in sorted(order, key=order.__getitem__)]
    lanes = ["copy-out", "copy-in", "disk-write", "disk-read"]
    assert shown == ["host", "compute", "stall", *lanes]
    # Readers without an order of their own go by number.
    assert shown == [names[tid] for tid in sorted(names)]


def test_an_op_says_what_it_is() -> None:
    run = run_of()
    (event,) = (e for e in ours(events_of(chrome_trace(run)))["compute"] if e["args"]["op"] == 3)
    assert event["name"] == "layer (layer3)"
    assert event["args"] == {
        "op": 3,
        "module": "layer3",
        "phase": "forward",
        "held_bytes": run.predicted.curve[3],
        "workspace_bytes": 0,
    }
    span = next(s for s in run.predicted.spans if s.lane is Lane.COMPUTE and s.op == 3)
    assert event["ts"] == pytest.approx(span.start_s * 1e6, abs=0.07)
    assert event["dur"] == pytest.approx(400.0)


def test_a_copy_says_what_moves_and_why() -> None:
    run = run_of()
    tracks = ours(events_of(chrome_trace(run)))
    value = next(span.value for span in run.predicted.spans if span.lane is Lane.COPY_OUT)
    save = run.trace.values[value].saves[0]
    args = tracks["copy-out"][0]["args"]
    assert tracks["copy-out"][0]["name"] == f"value {value} ({save.module})"
    assert args == {
        "value": value,
        "bytes": run.trace.storages[run.trace.values[value].storage].nbytes,
        "op": save.op,
        "saved_by": "layer",
        "module": save.module,
        "phase": "forward",
        "decision": "offload to host",
        "reason": "moved: the floor moves all that may move",
    }
    assert value in [event["args"]["value"] for event in tracks["copy-in"]]


def test_a_stall_says_what_was_waited_for() -> None:
    stalls = ours(events_of(chrome_trace(run_of())))["stall"]
    assert {event["name"] for event in stalls} >= {"wait for copy-in", "wait for host"}
    late = next(event for event in stalls if event["name"] == "wait for copy-in")
    assert late["args"]["cause"] == "copy-in"
    assert late["args"]["before"].startswith("layer_backward (")
    assert late["args"]["decision"] == "offload to host"


def flows(events: list[Event]) -> dict[int, list[str]]:
    """Tracks that each arrow passes, in order."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[int, list[str]] = {}
    for event in sorted((e for e in events if e["ph"] in "stf"), key=lambda e: e["ts"]):
        found.setdefault(event["id"], []).append(names[event["tid"]])
    return found


def test_arrows_lead_from_each_copy_of_a_value_to_its_next() -> None:
    run = run_of()
    arrows = flows(events_of(chrome_trace(run)))
    assert len(arrows) == len(run.plan.decisions) > 0
    assert all(arrow == ["copy-out", "copy-in"] for arrow in arrows.values())
    passed = flows(events_of(chrome_trace(staged()))).values()
    assert ["copy-out", "disk-write", "disk-read", "copy-in"] in passed


def test_no_arrow_joins_copies_that_overlap() -> None:
    run = recorded()
    assert run.measured is not None
    value = run.measured.spans[0].value
    pieces = tuple(
        Span(lane, start, start + 0.001, value=value)
        for lane, start in [
            (Lane.COPY_OUT, 0.001),
            (Lane.DISK_WRITE, 0.0015),
            (Lane.DISK_READ, 0.006),
            (Lane.COPY_IN, 0.0065),
        ]
    )
    run = replace(run, measured=replace(run.measured, spans=pieces, stalls=()))
    events = events_of(chrome_trace(run))
    pid = pid_of(events, "measured")
    arrows = flows([e for e in events if e["pid"] == pid])
    assert list(arrows.values()) == [["disk-write", "disk-read"]]


def test_bytes_held_are_counters() -> None:
    run = run_of()
    events = events_of(chrome_trace(run))
    found = counters(events)
    assert found["budget of device"] == {0.0: BUDGET}
    assert max(found["held on device"].values()) == run.predicted.peak(Tier.DEVICE)
    assert max(found["held on host"].values()) == run.predicted.peak(Tier.HOST) > 0
    assert "held on disk" not in found
    at = {e["args"]["op"]: e["ts"] for e in ours(events)["compute"]}
    assert found["held on device"][at[0]] == run.predicted.curve[0]
    assert found["held on device"][at[run.predicted.peak_op]] == run.predicted.peak(Tier.DEVICE)


def test_a_recorded_iteration_is_a_process_of_its_own() -> None:
    run = recorded()
    events = events_of(chrome_trace(run))
    threads_are_stacks(events)
    tracks = ours(events, "measured")
    assert {name: len(found) for name, found in tracks.items()} == {
        "stall": 2,
        "copy-out": 1,
        "copy-out 2": 1,
        "copy-in": 2,
    }
    assert [(e["name"], e["ts"], e["dur"]) for e in tracks["stall"]] == [
        ("wait for copy-out", 2500.0, 500.0),
        ("wait for copy-in", 6750.0, 250.0),
    ]
    held = counters(events, "measured")["held on device"]
    assert held == {0.0: MIB, 4000.0: 5 * MIB, 8000.0: 2 * MIB}
    assert pid_of(events, "measured") != pid_of(events, "predicted")


def test_recorded_compute_names_the_op_that_it_began_with() -> None:
    run = recorded()
    assert run.measured is not None
    spans = (Span(Lane.COMPUTE, 0.0, 0.004, op=3), Span(Lane.COMPUTE, 0.004, 0.01, op=-1))
    seen = replace(run.measured, spans=spans, stalls=())
    first, second = ours(events_of(chrome_trace(replace(run, measured=seen))), "measured")[
        "compute"
    ]
    assert (first["name"], first["args"]) == ("from layer (layer3)", {"from_op": 3})
    assert second["name"] == "from compute"


def test_what_was_not_recorded_is_no_process() -> None:
    run = recorded()
    assert run.measured is not None
    seen = replace(run.measured, spans=(), stalls=(), held=())
    assert chrome_trace(replace(run, measured=seen)) == chrome_trace(replace(run, measured=None))


def test_a_stall_at_the_end_is_before_the_end() -> None:
    run = recorded()
    assert run.measured is not None
    last = replace(run.measured.stalls[1], op=len(run.trace.ops))
    events = events_of(chrome_trace(replace(run, measured=replace(run.measured, stalls=(last,)))))
    (event,) = ours(events, "measured")["stall"]
    assert event["args"]["before"] == "the end of the iteration"


def test_bytes_counted_more_than_once_at_one_moment_show_the_most() -> None:
    run = recorded()
    assert run.measured is not None
    held = (Held(0, 0.001, 5), Held(1, 0.001, 9), Held(2, 0.001, 7), Held(3, 0.002, 9))
    run = replace(run, measured=replace(run.measured, held=held))
    found = counters(events_of(chrome_trace(run)), "measured")
    assert found["held on device"] == {1000.0: 9}


def test_nothing_lies_before_zero() -> None:
    run = recorded()
    assert run.measured is not None
    early = Span(Lane.COPY_OUT, -0.002, 0.0005, value=run.measured.spans[0].value)
    seen = replace(run.measured, spans=(early, *run.measured.spans[1:]))
    events = events_of(chrome_trace(replace(run, measured=seen)))
    assert min(e["ts"] for e in ours(events, "measured")["copy-out"]) == 0.0
    assert min(e["ts"] for e in ours(events)["host"]) == 2000.0
    stalls = (replace(run.measured.stalls[0], start_s=-0.003),)
    events = events_of(chrome_trace(replace(run, measured=replace(seen, stalls=stalls))))
    assert [e["ts"] for e in ours(events, "measured")["stall"]] == [0.0]
    assert min(e["ts"] for e in ours(events)["host"]) == 3000.0


def test_an_encoding_is_work_of_compute_without_an_arrow() -> None:
    run = run_of(policy="baseline")
    value = next(v for v in run.trace.saved if run.trace.values[v].first_read is not None)
    found = run.trace.values[value]
    read = found.first_read
    assert read is not None
    choice = Assignment(value, Encode("bits", 8, found.first_save, read))
    plan = replace(run.plan, assignments=(choice,))
    predicted = simulate(run.trace, run.hardware, plan)
    events = events_of(chrome_trace(replace(run, plan=plan, predicted=predicted)))
    done = [e for e in ours(events)["compute"] if "value" in e["args"]]
    assert [event["args"]["decision"] for event in done] == ["encode (bits)"] * 2
    assert flows(events) == {}


def test_names_are_escaped() -> None:
    bad = '\x1b[2J\u202e\n"</script>'
    run = run_of(hardware=CPU)
    ops = tuple(replace(op, name=bad, module=bad) for op in run.trace.ops)
    values = tuple(
        replace(v, saves=tuple(replace(save, module=bad) for save in v.saves))
        for v in run.trace.values
    )
    trace = replace(run.trace, ops=ops, values=values)
    reasons = tuple(replace(a, reason=bad) for a in run.plan.assignments)
    plan = replace(run.plan, trace=trace.fingerprint, assignments=reasons, planner=bad)
    hardware = replace(run.hardware, name=bad)
    content = chrome_trace(replace(run, trace=trace, plan=plan, hardware=hardware))
    events_of(content)

    def texts(data: object) -> list[str]:
        if isinstance(data, dict):
            return [text for item in data.items() for part in item for text in texts(part)]
        if isinstance(data, list):
            return [text for part in data for text in texts(part)]
        return [data] if isinstance(data, str) else []

    found = texts(json.loads(content))
    assert all(text.isprintable() for text in found)
    assert any("\\x1b[2J\\u202e\\n" in text for text in found)


def test_the_same_run_gives_the_same_bytes() -> None:
    assert chrome_trace(recorded()) == chrome_trace(recorded())


def test_it_says_what_it_is_of() -> None:
    run = run_of()
    about = json.loads(chrome_trace(run))["belady"]
    assert about["trace"] == run.trace.fingerprint
    assert about["planner"] == run.plan.planner
    assert about["budget_bytes"] == BUDGET


def test_an_empty_run_is_a_trace() -> None:
    run = run_of(policy="baseline")
    trace = replace(run.trace, ops=(), storages=(), values=(), anchors=())
    plan = replace(run.plan, trace=trace.fingerprint, assignments=())
    predicted = replace(run.predicted, spans=(), stalls=(), curve=())
    events = events_of(chrome_trace(replace(run, trace=trace, plan=plan, predicted=predicted)))
    assert ours(events) == {}
    assert counters(events)["budget of device"] == {0.0: BUDGET}
