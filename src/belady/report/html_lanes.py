"""The lanes over time, and what compute waited for, predicted or measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from belady.ir.run import Run
from belady.ir.timeline import Cause, Lane, Measured, Span, Stall, Timeline
from belady.report.facts import short_name
from belady.report.html_axis import COLUMNS, Axis, number
from belady.units import format_bytes, format_seconds

HEIGHT = 20
# What is narrower and not alone is drawn as the share that it and its neighbours fill of a column.
_NARROWEST = 3.0
_THINNEST = 1.0
_LEAST_SHARE = 0.08
_NAMES = {
    Cause.COPY_OUT: "waits for copy-out",
    Cause.COPY_IN: "waits for copy-in",
    Cause.HOST: "waits for the host",
}


class Box(NamedTuple):
    """One piece of work that is wide enough to be seen, in percent."""

    left: float
    width: float
    title: str


class Row(NamedTuple):
    """A lane or a cause: its total, its wide pieces, and a path for the narrow ones."""

    name: str
    kind: str
    total: str
    boxes: tuple[Box, ...]
    path: str


class _Piece(NamedTuple):
    start_s: float
    end_s: float
    about: Span | Stall


def lanes(run: Run, side: Timeline | Measured, axis: Axis) -> list[Row]:
    """Rows from top to bottom: the host, compute with its waits below, the copies."""
    rows = []
    title = _Titles(run, "" if isinstance(side, Timeline) else "from ")
    for lane in Lane:
        mine = [_Piece(span.start_s, span.end_s, span) for span in side.spans if span.lane is lane]
        if mine:
            kind = lane.value if lane in (Lane.HOST, Lane.COMPUTE) else "copies"
            rows.append(_row(lane.value, kind, mine, axis, title))
        if lane is Lane.COMPUTE:
            rows += _wait_rows(side.stalls, axis, title)
    return rows


def _wait_rows(
    stalls: Sequence[Stall], axis: Axis, title: Callable[[Span | Stall], str]
) -> Iterator[Row]:
    for cause, name in _NAMES.items():
        mine = [_Piece(s.start_s, s.end_s, s) for s in stalls if s.cause is cause]
        if mine:
            yield _row(name, f"wait-{cause.value}", mine, axis, title)


def _row(
    name: str,
    kind: str,
    pieces: Sequence[_Piece],
    axis: Axis,
    title: Callable[[Span | Stall], str],
) -> Row:
    pieces = sorted(pieces, key=itemgetter(0, 1))
    boxes: list[Box] = []
    shares = [0.0] * COLUMNS
    starts, ends, _ = zip(*pieces, strict=True)
    edges = list(zip(axis.columns(starts), axis.columns(ends), strict=True))
    for alone, (left, right), (start, end, about) in zip(_alone(edges), edges, pieces, strict=True):
        if alone or right - left >= _NARROWEST:
            text = f"{title(about)}, {format_seconds(end - start)}"
            width = max(right - left, _THINNEST)
            percent = 100 / COLUMNS
            boxes.append(Box(round(left * percent, 2), round(width * percent, 2), text))
        else:
            _add(shares, left, right)
    total = sum(piece.end_s - piece.start_s for piece in pieces)
    return Row(name, kind, format_seconds(total), tuple(boxes), _shares_path(shares))


def _alone(edges: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether each piece, given in order of start, has its columns for itself."""
    lefts, rights = ([int(edge) for edge in side] for side in zip(*edges, strict=True))
    reached = [-1, *accumulate(rights[:-1], max)]
    nexts = [*lefts[1:], COLUMNS + 1]
    return [
        before < left and right < after
        for before, left, right, after in zip(reached, lefts, rights, nexts, strict=True)
    ]


def _add(shares: list[float], left: float, right: float) -> None:
    """Add what lies between two places to the share of each column there."""
    if right < int(left) + 1 <= COLUMNS:  # as nearly all of many do
        shares[int(left)] += right - left
        return
    for column in range(int(left), min(int(right) + 1, COLUMNS)):
        shares[column] += max(0.0, min(right, column + 1) - max(left, column))


def _shares_path(shares: Iterable[float]) -> str:
    """Bars from the bottom, one for each run of columns of the same height."""
    path: list[str] = []
    begun, height = 0, 0.0
    for column, share in enumerate([*shares, 0.0]):
        found = round(HEIGHT * min(max(share, _LEAST_SHARE), 1.0), 1) if share > 0 else 0.0
        if found != height:
            if height:
                path.append(f"M{begun} {HEIGHT}v{number(-height)}h{column - begun}V{HEIGHT}z")
            begun, height = column, found
    return "".join(path)


class _Titles:
    """What a piece of work is called.

    A recorded piece of compute or host is named by the op that it began with, and may be several:
    ``start`` says so.
    """

    def __init__(self, run: Run, start: str) -> None:
        self._trace = run.trace
        self._start = start

    def __call__(self, about: Span | Stall) -> str:
        if about.value >= 0:
            return self._value(about.value)
        if 0 <= about.op < len(self._trace.ops):
            op = self._trace.ops[about.op]
            start = self._start if isinstance(about, Span) else ""
            return f"{start}op {about.op} {short_name(op.name)}{_in(op.module)} ({op.phase.value})"
        return "the end"

    def _value(self, index: int) -> str:
        value = self._trace.values[index]
        size = format_bytes(self._trace.storages[value.storage].nbytes)
        if not value.saves:
            return f"value {index}, {size}"
        save = value.saves[0]
        saver = short_name(self._trace.ops[save.op].name)
        return f"value {index}, {size}, saved by {saver}{_in(save.module)}"


def _in(module: str) -> str:
    return f" in {module}" if module else ""
