"""Turns what a tape took down of one iteration into spans, stalls and bytes held."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from belady.ir.timeline import Cause, Held, Lane, Measured, Span, Stall
from belady.memory.tape import END, Tape

_CAUSES = {
    Lane.COPY_OUT: Cause.COPY_OUT,
    Lane.DISK_WRITE: Cause.COPY_OUT,
    Lane.COPY_IN: Cause.COPY_IN,
    Lane.DISK_READ: Cause.COPY_IN,
}


def with_events(measured: Measured, tape: Tape) -> Measured:
    """Level 2 of ``measured``: every copy and wait of the iteration on ``tape``.

    Compute is known between two anchors, not op by op: a span of compute or host names the op at
    which it began. Blocks until the device has passed the last event.
    """
    waits = [
        (tape.begun(wait.start), tape.ended(wait.end), wait)
        for wait in sorted(tape.waits, key=lambda wait: wait.boundary)
    ]
    copies = [
        Span(copy.lane, begun, max(begun, tape.ended(copy.end)), -1, copy.label)
        for copy in tape.copies
        for begun in (tape.begun(copy.start),)
    ]
    anchors = [(anchor.boundary, tape.begun(anchor.tick), anchor) for anchor in tape.anchors]
    holes = _Holes((start, end) for start, end, _ in waits)
    compute = [
        Span(Lane.COMPUTE, begun, ended, op)
        for (op, start, _), (_, end, _) in pairwise(anchors)
        for begun, ended in _without(start, end, holes.within(start, end))
    ]
    host = [
        Span(Lane.HOST, tape.begun(one.host), tape.begun(two.host), one.boundary)
        for one, two in pairwise(tape.anchors)
    ]
    return replace(
        measured,
        level=2,
        spans=tuple(sorted((*copies, *compute, *host), key=lambda span: span.start_s)),
        stalls=tuple(
            Stall(_CAUSES[wait.lane], wait.boundary, wait.label, end - start, start)
            for start, end, wait in waits
            if end > start
        ),
        held=tuple(
            Held(boundary, max(0.0, seconds), anchor.nbytes)
            for boundary, seconds, anchor in anchors
            if anchor.nbytes and boundary != END
        ),
    )


class _Holes:
    """Times that may overlap, of which a deep network has thousands between as many anchors."""

    def __init__(self, holes: Iterable[tuple[float, float]]) -> None:
        self._holes = sorted(holes)
        self._starts = [start for start, _ in self._holes]
        self._reach = list(accumulate((end for _, end in self._holes), max))

    def within(self, start: float, end: float) -> list[tuple[float, float]]:
        """Those that may reach into ``start`` to ``end``, by their start."""
        return self._holes[bisect_right(self._reach, start) : bisect_left(self._starts, end)]


def _without(
    start: float, end: float, holes: Iterable[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """What is left of ``start`` to ``end`` without ``holes``, which are given by their start."""
    for hole_start, hole_end in holes:
        if hole_end <= start or hole_start >= end:
            continue
        if hole_start > start:
            yield start, hole_start
        start = max(start, hole_end)
    if end > start:
        yield start, end
