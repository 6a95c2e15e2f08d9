"""A Run as plain text for a terminal: the answer first, then what moved and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from belady.ir.run import Run
from belady.report import facts
from belady.report.distance import distance
from belady.report.remarks import remarks
from belady.units import format_bytes, printable

_ROWS = 12


def describe(run: Run) -> str:
    """Say whether it fits, what it cost, what moved and why, and what could not be managed.

    Names from the user's model are escaped: nothing in the text can steer a terminal.

    Parameters
    ----------
    run
        Its ``measured`` may be None: then predictions stand alone.

    Returns
    -------
    str
        Lines, each ended by a newline.
    """
    parts = (
        [facts.answer(run), facts.subject(run)],
        _figures(run),
        _peak(run),
        _moved(run),
        _largest(run),
        _defaults(run),
        _outside(run),
        _remarks(run),
    )
    sections = ["\n".join(printable(line) for line in part) for part in map(list, parts) if part]
    return "\n\n".join(sections) + "\n"


def _figures(run: Run) -> Iterator[str]:
    yield from _table([("", "predicted", "measured"), *facts.figures(run)])
    yield from facts.measurement(run)
    yield distance(run).sentence


def _peak(run: Run) -> Iterator[str]:
    place = facts.peak_place(run)
    if place:
        parts = [f"{name} {format_bytes(nbytes)}" for name, nbytes in facts.held_at_peak(run)]
        yield f"Predicted peak: {place}"
        yield f"  held then: {', '.join(parts)}"


def _moved(run: Run) -> Iterator[str]:
    if not run.plan.decisions:
        yield "Nothing moves."
    for name, count, nbytes in facts.groups(run):
        yield f"{name}: {count} saved values, {format_bytes(nbytes)}"


def _largest(run: Run) -> Iterator[str]:
    found = facts.largest(run, _ROWS)
    if not found:
        return
    rows: list[Sequence[str]] = [
        ("module", "saved by", "shape", "dtype", "bytes", "decision", "reason")
    ]
    for _, *named, nbytes, decision, reason in found:
        rows.append((*named, format_bytes(nbytes), decision, reason))
    left = len(run.trace.saved) - len(found)
    yield f"The largest saved values{f' ({left} more are smaller or equal)' if left else ''}:"
    yield from _table(rows)


def _defaults(run: Run) -> Iterator[str]:
    found = facts.defaults(run)
    if found is not None:
        sentence, reasons = found
        yield sentence
        yield from (f"  {reason}" for reason in reasons)


def _outside(run: Run) -> Iterator[str]:
    found = facts.outside(run)
    if found:
        yield "Outside management (in the budget unless said otherwise, never moved):"
        yield from (f"  {name}: {format_bytes(nbytes)}" for name, nbytes in found)


def _remarks(run: Run) -> Iterator[str]:
    yield from remarks(run)
    versions = facts.versions(run)
    if versions:
        yield f"Versions: {versions}"


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns flush left, two spaces apart."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(padded)}".rstrip()
