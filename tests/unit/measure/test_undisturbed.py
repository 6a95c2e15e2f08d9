"""Of two observations of an iteration, each op has the seconds of the one that went smoothly."""

from __future__ import annotations

from dataclasses import replace

from belady.ir.files import validate
from belady.ir.trace import Replay, Trace
from belady.measure.observe import undisturbed
from tests.support.builder import OpSpec, build_trace

OPS = 6  # three forward, three backward


def trace_of(*specs: OpSpec) -> Trace:
    return build_trace(specs or (OpSpec(),) * 3)


def with_seconds(
    trace: Trace, device: dict[int, float] | None = None, host: dict[int, float] | None = None
) -> Trace:
    """The trace with other seconds for some ops."""
    ops = list(trace.ops)
    for index, seconds in (device or {}).items():
        ops[index] = replace(ops[index], device_seconds=seconds)
    for index, seconds in (host or {}).items():
        ops[index] = replace(ops[index], host_seconds=seconds)
    return replace(trace, ops=tuple(ops))


def device_seconds(trace: Trace) -> list[float]:
    return [op.device_seconds for op in trace.ops]


def host_seconds(trace: Trace) -> list[float]:
    return [op.host_seconds for op in trace.ops]


def test_each_op_has_the_smaller_seconds_of_both() -> None:
    smooth = trace_of()
    first = with_seconds(smooth, device={0: 1.0, 4: 1.0}, host={2: 1.0})
    second = with_seconds(smooth, device={1: 1.0}, host={2: 2.0, 5: 1.0})
    both = undisturbed(second, first)
    assert device_seconds(both) == device_seconds(smooth)
    assert host_seconds(both) == host_seconds(with_seconds(smooth, host={2: 1.0}))
    assert undisturbed(first, second).ops == both.ops


def test_only_seconds_are_taken_from_the_other() -> None:
    trace = trace_of()
    ops = tuple(replace(op, workspace_bytes=77, module="other") for op in trace.ops)
    other = with_seconds(replace(trace, ops=ops, roots=("Other",)), device={0: 0.0})
    both = undisturbed(trace, other)
    assert both == with_seconds(trace, device={0: 0.0})
    validate(both)


def test_without_another_the_trace_is_as_it_was() -> None:
    trace = trace_of()
    assert undisturbed(trace, None) is trace
    assert undisturbed(trace, trace) == trace


def test_from_the_first_other_op_on_seconds_are_its_own() -> None:
    trace = with_seconds(trace_of(), device=dict.fromkeys(range(OPS), 2.0))
    other = with_seconds(trace, device=dict.fromkeys(range(OPS), 1.0))
    for index in range(OPS):
        ops = list(other.ops)
        ops[index] = replace(ops[index], name="another")
        renamed = undisturbed(trace, replace(other, ops=tuple(ops)))
        assert device_seconds(renamed) == [1.0] * index + [2.0] * (OPS - index)


def test_an_op_that_reads_other_values_is_another_op() -> None:
    trace = with_seconds(trace_of(), device=dict.fromkeys(range(OPS), 2.0))
    other = with_seconds(trace, device=dict.fromkeys(range(OPS), 1.0))
    ops = list(other.ops)
    ops[3] = replace(ops[3], reads=(*ops[3].reads, 0))
    both = undisturbed(trace, replace(other, ops=tuple(ops)))
    assert device_seconds(both) == [1.0] * 3 + [2.0] * 3


def test_one_that_ends_earlier_counts_as_far_as_it_goes() -> None:
    trace = with_seconds(trace_of(), device=dict.fromkeys(range(OPS), 2.0))
    other = with_seconds(trace, device=dict.fromkeys(range(OPS), 1.0))
    short = replace(other, ops=other.ops[:2])
    assert device_seconds(undisturbed(trace, short)) == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert device_seconds(undisturbed(replace(trace, ops=trace.ops[:2]), other)) == [1.0, 1.0]


def test_no_op_becomes_slower() -> None:
    fast, slow = trace_of(), trace_of(*(OpSpec(device_us=50, host_us=20),) * 3)
    assert undisturbed(fast, slow) == fast


def test_what_runs_instead_of_an_op_takes_no_longer_than_the_op() -> None:
    # It was run beside what the op had left, and the allocator may have flushed its cache for that.
    smooth = with_seconds(trace_of(), device={0: 2.0, 1: 2.0, 2: 9.0})
    ops = [
        replace(op, shortcut=Replay(seconds, op.reads, op.writes))
        for op, seconds in zip(smooth.ops, (7.0, 1.0, 5.0), strict=False)
    ]
    trace = replace(smooth, ops=(*ops, *smooth.ops[3:]))
    both = undisturbed(trace, with_seconds(smooth, device={2: 3.0}))
    assert [op.replay.device_seconds for op in both.ops[:3]] == [2.0, 1.0, 3.0]
    validate(both)
