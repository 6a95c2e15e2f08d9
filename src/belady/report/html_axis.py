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
from belady.ir.timeline import Lane
from belady.units import format_seconds

COLUMNS = 1000
_TICKS = 7
_NICE = (1, 2, 2.5, 5)
_NARROWEST_BAND = 2
_WIDTH_OF_A_NAME = 9.0


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
    """

    end_s: float
    starts: Sequence[float]

    def column(self, seconds: float) -> float:
        """Where a moment is, in columns."""
        return min(max(seconds / self.end_s, 0.0), 1.0) * COLUMNS

    def columns(self, moments: Iterable[float]) -> list[float]:
        """Where each of many moments is, in columns."""
        end, last = self.end_s, float(COLUMNS)
        places = (moment / end * COLUMNS for moment in moments)
        return [0.0 if at < 0 else last if at > last else at for at in places]

    def percent(self, seconds: float) -> float:
        """Where a moment is, in percent."""
        return round(self.column(seconds) * 100 / COLUMNS, 2)

    def ticks(self) -> list[Tick]:
        """Round moments, the first at 0."""
        step = nice_step(self.end_s / _TICKS)
        count = int(self.end_s / step * (1 + 1e-9))
        marks = (n * step for n in range(1, count + 1))
        return [Tick(0.0, "0"), *(Tick(self.percent(at), format_seconds(at)) for at in marks)]


def axis_of(run: Run) -> Axis:
    """The axis of a run: as long as what is predicted and every event measured."""
    measured = run.measured.spans if run.measured else ()
    ends = [span.end_s for span in (*run.predicted.spans, *measured)]
    return Axis(max([run.predicted.seconds, *ends]) or 1.0, _op_starts(run))


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
