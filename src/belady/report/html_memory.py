"""Device memory over the iteration: stacked by kind, against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, gt
from typing import NamedTuple

from belady.ir.curves import curve, managed_room, tier_curve
from belady.ir.residency import Interval, intervals
from belady.ir.run import Run
from belady.ir.trace import StorageKind, Tier
from belady.report.html_axis import (
    COLUMNS,
    Axis,
    Tick,
    extremes,
    nice_step,
    steps,
)
from belady.units import format_bytes

HEIGHT = 280
# Above the highest point: room for the names of budget and peak.
_HEADROOM = 30
WORKSPACE = "workspace"
MANAGED = "managed"
# From the bottom: what is always there comes first.
_ORDER = (
    StorageKind.PARAMETER,
    StorageKind.STATE,
    StorageKind.GRADIENT,
    StorageKind.BUFFER,
    StorageKind.INPUT,
    StorageKind.OTHER,
    StorageKind.ACTIVATION,
)
# A budget that is larger by more is not drawn: everything else would be flat.
_FARTHEST_BUDGET = 2.0
_TICKS = 5
# Columns are taken together in hundredths to find room for a name.
_HUNDREDTHS = 100
_NAME_WIDTH = 16
_NAME_HEIGHT = 17
_CLEAR = 22
_GAP = 7


class Layer(NamedTuple):
    """One kind of bytes: its area down to the bottom, and where its name has room, if it has."""

    kind: str
    path: str
    at_peak: int
    name_percent: float | None
    name_y: float


class Level(NamedTuple):
    """A number of bytes as a line across; ``y`` is None where it is beyond the drawing."""

    kind: str
    y: float | None
    text: str


@dataclass(frozen=True)
class Memory:
    """All that the drawing shows; layers from the top one to the bottom one."""

    layers: tuple[Layer, ...]
    levels: tuple[Level, ...]
    held: str
    peak: Tick
    peak_y: float
    peak_name_y: float
    ticks: tuple[Tick, ...]


def memory(run: Run, axis: Axis) -> Memory | None:
    """Draw the device memory; None where the trace has no op."""
    if not run.trace.ops:
        return None
    names, stack = _stack(run)
    totals = stack[-1]
    at = min(max(run.predicted.peak_op, 0), len(totals) - 1)
    scale = _Scale(_ceiling(run, max(totals)))
    chosen = _chosen(totals, axis)
    columns = [axis.column(axis.starts[op]) for op in chosen]
    right = axis.column(axis.starts[-1])
    levels = tuple(_levels(run, scale))
    layers = []
    for index, name in enumerate(names):
        below = stack[index - 1] if index else [0] * len(totals)
        upper = [scale.y(stack[index][op]) for op in chosen]
        lower = [scale.y(below[op]) for op in chosen]
        path = steps(zip(columns, upper, strict=True), right)
        path += f"V{HEIGHT}H{columns[0]:.0f}Z"
        room = _room([*columns, right], lower, upper)
        layers.append(Layer(name, path, stack[index][at] - below[at], *room))
    peak = max(totals[at], run.predicted.peak(Tier.DEVICE))
    return Memory(
        layers=tuple(reversed([layer for layer in layers if layer.path])),
        levels=levels,
        held=_held(run, axis, scale),
        peak=Tick(axis.percent(axis.starts[at]), format_bytes(peak)),
        peak_y=scale.y(peak),
        peak_name_y=_above(scale.y(peak), levels),
        ticks=scale.ticks(),
    )


def _stack(run: Run) -> tuple[list[str], list[list[int]]]:
    """Kinds that hold bytes, and for each the bytes held by it and those below, op by op."""
    trace, allocator = run.trace, run.hardware.allocator
    spans = intervals(trace, run.plan)
    by_kind: dict[StorageKind, list[Interval]] = {kind: [] for kind in _ORDER}
    kinds = [storage.kind for storage in trace.storages]
    for span in spans:
        by_kind[kinds[span.storage]].append(span)
    total = run.predicted.curve or curve(trace, run.plan, allocator, spans)
    room = managed_room(trace, run.plan, allocator)
    rows = {MANAGED: [room] * len(total)} if room else {}
    for kind, mine in by_kind.items():
        if mine:
            rows[kind.value] = tier_curve(mine, Tier.DEVICE, len(trace.ops), allocator)
    rows = {name: row for name, row in rows.items() if any(row)}
    sums = list(accumulate(rows.values(), lambda low, row: list(map(add, low, row))))
    known = sums[-1] if sums else [0] * len(total)
    if not rows or any(map(gt, total, known)):
        return [*rows, WORKSPACE], [*sums, list(map(max, total, known))]
    return list(rows), sums


def _chosen(totals: Sequence[int], axis: Axis) -> list[int]:
    """Ops that are drawn."""
    columns = list(map(int, axis.columns(axis.starts[:-1])))
    return sorted({0, *extremes(columns, totals)})


class _Scale:
    """Bytes as heights; y grows downwards."""

    def __init__(self, ceiling: int) -> None:
        self.ceiling = max(ceiling, 1)

    def y(self, nbytes: float) -> float:
        return HEIGHT - (HEIGHT - _HEADROOM) * min(nbytes / self.ceiling, 1.1)

    def ticks(self) -> tuple[Tick, ...]:
        unit = next(1 << shift for shift in (40, 30, 20, 10, 0) if self.ceiling >> shift)
        step = nice_step(self.ceiling / unit / _TICKS) * unit
        count = int(self.ceiling / step)
        marks = [round(step * n) for n in range(1, count + 1)]
        return tuple(Tick(round(self.y(n) * 100 / HEIGHT, 2), format_bytes(n)) for n in marks)


def _ceiling(run: Run, predicted: int) -> int:
    """Bytes at the top of the drawing."""
    measured = run.measured
    seen = [predicted, run.predicted.peak(Tier.DEVICE)]
    if measured is not None:
        seen += [measured.peak(Tier.DEVICE), measured.reserved_bytes]
        seen += [held.nbytes for held in measured.held]
    highest = max(seen)
    budget = run.plan.budget.device_bytes
    return max(highest, budget) if budget <= _FARTHEST_BUDGET * highest else highest


def _levels(run: Run, scale: _Scale) -> list[Level]:
    def level(kind: str, nbytes: int) -> Level:
        y = scale.y(nbytes) if nbytes <= scale.ceiling else None
        return Level(kind, y, format_bytes(nbytes))

    measured = run.measured
    found = [level("budget", run.plan.budget.device_bytes)]
    if measured is not None:
        found.append(level("measured", measured.peak(Tier.DEVICE)))
        if measured.reserved_bytes:
            found.append(level("reserved", measured.reserved_bytes))
    return found


def _above(y: float, levels: Sequence[Level]) -> float:
    """Where a name above ``y`` stands clear of the lines across."""
    for line in sorted((level.y for level in levels if level.y is not None), reverse=True):
        if y - _CLEAR < line <= y:
            y = line
    return y - _GAP


def _held(run: Run, axis: Axis, scale: _Scale) -> str:
    """Path of the bytes counted at boundaries, each where its op is predicted to start."""
    held = sorted(run.measured.held, key=lambda item: item.boundary) if run.measured else []
    columns = [axis.column(axis.starts[item.boundary]) for item in held]
    heights = [scale.y(item.nbytes) for item in held]
    chosen = extremes([int(column) for column in columns], heights)
    points = ((columns[index], heights[index]) for index in chosen)
    return steps(points, axis.column(axis.starts[-1]))


def _room(
    edges: Sequence[float], lower: Sequence[float], upper: Sequence[float]
) -> tuple[float | None, float]:
    """Where a layer is high enough for its name, in percent, and the middle of it there."""
    low, high = [float(HEIGHT)] * _HUNDREDTHS, [0.0] * _HUNDREDTHS
    scale = _HUNDREDTHS / COLUMNS
    reached = [False] * _HUNDREDTHS
    for (left, right), bottom, top in zip(pairwise(edges), lower, upper, strict=True):
        for slot in range(int(left * scale), min(int(right * scale) + 1, _HUNDREDTHS)):
            low[slot], high[slot] = min(low[slot], bottom), max(high[slot], top)
            reached[slot] = True
    best, where, middle = float(_NAME_HEIGHT), None, 0.0
    for slot in range(_HUNDREDTHS - _NAME_WIDTH + 1):
        window = slice(slot, slot + _NAME_WIDTH)
        bottom, top = min(low[window]), max(high[window])
        if all(reached[window]) and bottom - top > best:
            best, where, middle = bottom - top, slot + _NAME_WIDTH / 2, (bottom + top) / 2
    return where, round(middle, 1)
