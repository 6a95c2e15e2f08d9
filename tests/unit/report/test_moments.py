"""When each stall was: what a copy or the host leaves of the time between two ops."""

from __future__ import annotations

import pytest

from belady.ir.timeline import Cause, Lane, Span, Stall
from belady.report.moments import waits


def work(op: int, start: float, end: float, value: int = -1) -> Span:
    return Span(Lane.COMPUTE, start, end, op=op, value=value)


def copy(lane: Lane, start: float, end: float) -> Span:
    return Span(lane, start, end, value=5)


def times(spans: list[Span], stalls: list[Stall], *, serial: bool) -> list[tuple[float, float]]:
    return [(wait.start_s, wait.end_s) for wait in waits(spans, stalls, serial=serial)]


def test_beside_the_host_its_delay_comes_before_the_copys() -> None:
    spans = [work(0, 0.0, 1.0), copy(Lane.COPY_IN, 0.5, 4.0), work(1, 4.0, 5.0)]
    stalls = [Stall(Cause.HOST, 1, -1, 1.0), Stall(Cause.COPY_IN, 1, 5, 2.0)]
    assert times(spans, stalls, serial=False) == [(1.0, 2.0), (2.0, 4.0)]


def test_on_one_thread_the_host_goes_on_after_the_copy() -> None:
    spans = [work(0, 0.0, 1.0), copy(Lane.DISK_READ, 0.5, 3.0), work(1, 4.0, 5.0)]
    stalls = [Stall(Cause.HOST, 1, -1, 1.0), Stall(Cause.COPY_IN, 1, 5, 2.0)]
    assert times(spans, stalls, serial=True) == [(3.0, 4.0), (1.0, 3.0)]


def test_an_encoding_before_an_op_is_not_the_op() -> None:
    spans = [work(0, 0.0, 1.0), work(1, 1.0, 2.0, value=7), work(1, 3.0, 4.0), work(1, 4.0, 5.0, 8)]
    assert times(spans, [Stall(Cause.HOST, 1, -1, 1.0)], serial=False) == [(2.0, 3.0)]


def test_what_was_recorded_as_idle_for_as_long_is_the_wait() -> None:
    # Compute noticed the end of the copy a little late.
    spans = [copy(Lane.COPY_IN, 0.0, 2.0), work(3, 0.0, 1.0), work(3, 2.25, 4.0), work(6, 4.5, 5.0)]
    stalls = [Stall(Cause.COPY_IN, 3, 5, 1.25), Stall(Cause.COPY_IN, 6, 5, 0.5)]
    assert times(spans, stalls, serial=False) == [(1.0, 2.25), (4.0, 4.5)]
    twice = [Stall(Cause.COPY_IN, 6, 5, 0.5)] * 2
    assert times(spans, twice, serial=False) == [(4.0, 4.5), (1.5, 2.0)]


@pytest.mark.parametrize(
    ("cause", "near", "far"),
    [
        (Cause.COPY_OUT, Lane.COPY_OUT, Lane.DISK_WRITE),
        (Cause.COPY_IN, Lane.COPY_IN, Lane.DISK_READ),
    ],
)
def test_compute_waits_for_the_lane_that_touches_the_device(
    cause: Cause, near: Lane, far: Lane
) -> None:
    stall = [Stall(cause, 1, 5, 0.5)]
    both = [copy(far, 2.0, 9.0), copy(near, 1.0, 2.0), copy(near, 2.0, 3.0)]
    assert times(both, stall, serial=False) == [(2.5, 3.0)]
    assert times(both[:1], stall, serial=True) == [(8.5, 9.0)]
    assert times([], stall, serial=False) == []
