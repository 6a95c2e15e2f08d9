"""The time axis that all drawings of a page share, and what lies on it.

Drawings are `COLUMNS` wide and stretched to the page; nothing is drawn finer than a column. Text
is not stretched: it is placed in percent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor, log10
from operator import attrgetter
from typing import NamedTuple

from belady.ir.run import Run
from belady.ir.timeline import Cause, Lane
from belady.ir.trace import Phase
from belady.units import format_seconds

COLUMNS = 1000
_TICKS = 7
_NICE = (1, 2, 2.5, 5)
_NARROWEST_BAND = 2
_WIDTH_OF_A_NAME = 9.0
# What the optimizer may have of the axis, and what it gets where it would have more.
_LARGEST_TAIL = 0.25
_TAIL = 0.15


class Tick(NamedTuple):
    """A place on an axis, in percent of its length."""

    percent: float
    text: str


class Band(NamedTuple):
    """A stretch of time with a name, in percent; the name is empty where there is no room."""

    left: float
    width: float
    kind: str
    name: str


@dataclass(frozen=True)
class Axis:
    """Time from 0 to ``end_s``, and when each op starts on it.

    Attributes
    ----------
    starts
        When compute is predicted to start each op; one more for the end of the iteration.
    tail_s
        The moment from which on time is drawn narrower; 0 where all of it is drawn alike.
    """

    end_s: float
    starts: Sequence[float]
    tail_s: float = 0.0

    @property
    def tail_percent(self) -> float:
        """Where the tail begins."""
        return self.percent(self.tail_s)

    @property
    def narrower(self) -> float:
        """How many times narrower the tail is drawn than what comes before."""
        return (self.end_s - self.tail_s) / _TAIL / (self.tail_s / (1 - _TAIL))

    def column(self, seconds: float) -> float:
        """Where a moment is, in columns."""
        return self.columns([seconds])[0]

    def columns(self, moments: Iterable[float]) -> list[float]:
        """Where each of many moments is, in columns."""
        end, last = self.end_s, float(COLUMNS)
        tail, head = (self.tail_s, last * (1 - _TAIL)) if self.tail_s else (end, last)
        rest = (last - head) / (end - tail) if end > tail else 0.0
        places = (it / tail * head if it <= tail else head + (it - tail) * rest for it in moments)
        return [0.0 if at < 0 else last if at > last else at for at in places]

    def percent(self, seconds: float) -> float:
        """Where a moment is, in percent."""
        return round(self.column(seconds) * 100 / COLUMNS, 2)

    def ticks(self) -> list[Tick]:
        """Round moments, the first at 0; of a tail the end alone."""
        even = self.tail_s or self.end_s
        step = nice_step(even / _TICKS)
        marks = [n * step for n in range(1, int(even / step * (1 + 1e-9)) + 1)]
        marks += [self.end_s] if self.tail_s else []
        return [Tick(0.0, "0"), *(Tick(self.percent(at), format_seconds(at)) for at in marks)]


def axis_of(run: Run) -> Axis:
    """The axis of a run: as long as what is predicted and every event measured."""
    measured = run.measured.spans if run.measured else ()
    ends = [span.end_s for span in (*run.predicted.spans, *measured)]
    starts, end = _op_starts(run), max([run.predicted.seconds, *ends]) or 1.0
    tail = max([starts[_optimizer(run)], *_events(run)])
    return Axis(end, starts, tail if 0 < tail < end * (1 - _LARGEST_TAIL) else 0.0)


def _optimizer(run: Run) -> int:
    """The first of the ops of an optimizer at the end of the trace."""
    first = len(run.trace.ops)
    while first and run.trace.ops[first - 1].phase is Phase.OPTIMIZER:
        first -= 1
    return first


def _events(run: Run) -> Iterator[float]:
    """Ends of all copies and waits for them, and where measured compute was last heard of."""
    for side in (run.predicted, run.measured):
        if side is not None:
            yield from (stall.end_s for stall in side.stalls if stall.cause is not Cause.HOST)
            yield from (span.end_s for span in side.spans if span.value >= 0)
    for span in run.measured.spans if run.measured else ():
        if span.lane is Lane.COMPUTE:
            yield span.start_s


def phases(run: Run, axis: Axis) -> Iterator[Band]:
    """Stretches of the predicted iteration that belong to one phase."""
    first = 0
    for phase, ops in groupby(run.trace.ops, attrgetter("phase")):
        last = first + sum(1 for _ in ops)
        left, right = axis.percent(axis.starts[first]), axis.percent(axis.starts[last])
        width = round(right - left, 2)
        if width * COLUMNS / 100 >= _NARROWEST_BAND:
            name = phase.value if width >= _WIDTH_OF_A_NAME else ""
            yield Band(left, width, phase.value, name)
        first = last


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of 10 that is at least ``least``."""
    power = 10.0 ** floor(log10(least))
    return next((power * factor for factor in _NICE if power * factor >= least), power * 10)


def extremes(columns: Sequence[int], heights: Sequence[float]) -> list[int]:
    """Of the points in each column the lowest and the highest, in their order."""
    chosen: list[int] = []
    for _, points in groupby(range(len(columns)), columns.__getitem__):
        found = list(points)
        ends = {min(found, key=heights.__getitem__), max(found, key=heights.__getitem__)}
        chosen += sorted(ends)
    return chosen


def steps(points: Iterable[tuple[float, float]], right: float) -> str:
    """Path of a step line, from each point level to the next and on to ``right``."""
    path: list[str] = []
    height = ""
    for x, y in points:
        if not path:
            path.append(f"M{number(x)} {number(y)}")
        elif number(y) != height:
            path.append(f"H{number(x)}V{number(y)}")
        height = number(y)
    return "".join(path) + f"H{number(right)}" if path else ""


def number(value: float) -> str:
    """A length in a drawing, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def _op_starts(run: Run) -> list[float]:
    """When compute starts each op; evenly spread where the prediction has no spans."""
    count, seconds = len(run.trace.ops), run.predicted.seconds
    found = {
        span.op: span.start_s
        for span in run.predicted.spans
        if span.lane is Lane.COMPUTE and span.value < 0
    }
    if not found:
        return [seconds * op / max(count, 1) for op in range(count + 1)]
    starts, before = [], 0.0
    for op in range(count):
        before = max(before, found.get(op, before))
        starts.append(before)
    return [*starts, max(before, seconds)]
