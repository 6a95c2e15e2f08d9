"""Tables of a page: the largest saved values, and the modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter, itemgetter
from typing import NamedTuple

from belady.ir.plan import Encode, Managed, Offload, Recompute
from belady.ir.residency import away, reload_end
from belady.ir.run import Run
from belady.ir.timeline import Measured, Timeline
from belady.ir.trace import Phase
from belady.report.facts import ABSENT, Saved, largest
from belady.report.html_axis import Axis

_VALUES = 25
_MODULES = 60
# In percent, so that the shortest stay is seen.
_THINNEST = 0.5


class Stretch(NamedTuple):
    """Part of the iteration, in percent."""

    left: float
    width: float


class Life(NamedTuple):
    """A saved value, when its bytes are on the device in full, and when they are not."""

    saved: Saved
    here: tuple[Stretch, ...]
    gone: Stretch | None


@dataclass
class ModuleRow:
    """What a module took part in: bytes of storages, seconds of kernels and of stalls."""

    name: str
    saved_bytes: int = 0
    moved_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    stall_s: float = 0.0


_COLUMNS = tuple(part.name for part in fields(ModuleRow)[1:])
_figures = attrgetter(*_COLUMNS)


@dataclass(frozen=True)
class Modules:
    """Rows in the order of execution; what was left out, together; the sum of all.

    ``largest`` has the largest figure of each column, ``nothing`` none.
    """

    rows: list[ModuleRow]
    left: int
    rest: ModuleRow
    total: ModuleRow
    largest: ModuleRow
    stalls_measured: bool
    nothing: ModuleRow = field(default_factory=lambda: ModuleRow(""))


def lives(run: Run, axis: Axis) -> list[Life]:
    """The largest saved values, each with its time on the device."""
    return [Life(saved, *_life(run, saved.value, axis)) for saved in largest(run, _VALUES)]


def _life(run: Run, index: int, axis: Axis) -> tuple[tuple[Stretch, ...], Stretch | None]:
    trace, decision = run.trace, run.plan.decisions.get(index)
    value = trace.values[index]
    storage = trace.storages[value.storage]
    begun, ended = storage.birth, storage.death

    def stretch(start: int, end: int) -> Stretch:
        left, right = (axis.percent(axis.starts[boundary]) for boundary in (start, end))
        return Stretch(left, round(max(right - left, _THINNEST), 2))

    if isinstance(decision, (Offload, Managed, Recompute)):
        left, back = away(trace, index, decision)
    elif isinstance(decision, Encode):
        left, back = decision.encode_at, decision.decode_at
    else:
        return (stretch(begun, ended),), None
    if left >= back:
        return (stretch(begun, ended),), None
    end = max(back, min(reload_end(trace, value), ended))
    return (stretch(begun, left), stretch(back, end)), stretch(left, back)


def modules(run: Run) -> Modules:
    """What each module took part in; those that take little of everything are put together."""
    found: dict[str, ModuleRow] = {}
    measured = run.measured
    stalls_measured = measured is not None and bool(measured.stalls)
    side = measured if measured is not None and stalls_measured else run.predicted
    _count_ops(run, found)
    _count_values(run, found)
    _count_stalls(run, side, found)
    total = _sum("all modules", found.values())
    shares = [(_share(row, total), row) for row in found.values()]
    ranked = [row for share, row in sorted(shares, key=itemgetter(0), reverse=True) if share]
    kept = {id(row) for row in ranked[:_MODULES]}
    return Modules(
        rows=[row for row in found.values() if id(row) in kept],
        left=len(ranked[_MODULES:]),
        rest=_sum("", ranked[_MODULES:]),
        total=total,
        largest=_largest(found.values()),
        stalls_measured=stalls_measured,
    )


def _count_ops(run: Run, found: dict[str, ModuleRow]) -> None:
    for op in run.trace.ops:
        if op.phase is Phase.BACKWARD:
            _row(found, op.module).backward_s += op.device_seconds
        elif op.phase is not Phase.OPTIMIZER:
            _row(found, op.module).forward_s += op.device_seconds


def _count_values(run: Run, found: dict[str, ModuleRow]) -> None:
    trace = run.trace
    counted: set[int] = set()
    for index in trace.saved:
        value = trace.values[index]
        row = _row(found, value.saves[0].module)
        nbytes = trace.storages[value.storage].nbytes
        if value.storage not in counted:
            row.saved_bytes += nbytes
            counted.add(value.storage)
        if isinstance(run.plan.decisions.get(index), (Offload, Managed)):
            row.moved_bytes += nbytes


def _count_stalls(run: Run, side: Timeline | Measured, found: dict[str, ModuleRow]) -> None:
    """Charge each wait for a copy to the module that saved what was copied."""
    for stall in side.stalls:
        if stall.value >= 0:
            saves = run.trace.values[stall.value].saves
            _row(found, saves[0].module if saves else "").stall_s += stall.seconds


def _row(found: dict[str, ModuleRow], module: str) -> ModuleRow:
    name = module or ABSENT
    if name not in found:
        found[name] = ModuleRow(name)
    return found[name]


def _sum(name: str, rows: Iterable[ModuleRow]) -> ModuleRow:
    return ModuleRow(name, *map(sum, zip(*map(_figures, rows), strict=True)))


def _largest(rows: Iterable[ModuleRow]) -> ModuleRow:
    return ModuleRow("", *map(max, zip(*map(_figures, rows), strict=True)))


def _share(row: ModuleRow, total: ModuleRow) -> float:
    """Largest part of any total that the module has."""
    wholes = zip(_figures(row), _figures(total), strict=True)
    return max((part / whole for part, whole in wholes if whole), default=0.0)
