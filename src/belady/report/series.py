"""What figures show of a Run, as plain numbers: bars by row, bytes by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from belady.ir.curves import curve, tier_curve
from belady.ir.residency import intervals
from belady.ir.run import Run
from belady.ir.timeline import Cause, Held, Lane, Measured, Timeline
from belady.ir.trace import Tier, Trace

STALL = "stall"
COPY = "copy"
ISSUE = "issuing"
_IDLE = ""

# More than a page can resolve makes a figure heavy and no clearer.
_BARS_ACROSS = 1000
_STEPS_ACROSS = 1000
_DOTS_ACROSS = 250


class Bar(NamedTuple):
    """Something of one kind that lasts: a phase of compute, a copy, a stall, or issuing."""

    kind: str
    start_s: float
    end_s: float


def rows(run: Run, side: Timeline | Measured) -> dict[str, list[Bar]]:
    """Bars of each lane that was used, few enough to draw; stalls are in compute's.

    Waiting for the host is left out: it is where nothing is drawn.
    """
    found: dict[str, list[Bar]] = {lane.value: [] for lane in Lane}
    for span in side.spans:
        if span.lane is Lane.COMPUTE and span.op >= 0:
            at = min(span.op, len(run.trace.ops) - 1)
            kind = run.trace.ops[at].phase.value
        else:
            kind = ISSUE if span.lane is Lane.HOST else COPY
        found[span.lane.value].append(Bar(kind, span.start_s, span.end_s))
    for stall in side.stalls:
        if stall.cause is not Cause.HOST:
            found[Lane.COMPUTE.value].append(Bar(STALL, stall.start_s, stall.end_s))
    end = max((bar.end_s for bars in found.values() for bar in bars), default=0.0)
    return {name: _resolved(bars, end) for name, bars in found.items() if bars}


def phases(trace: Trace) -> list[tuple[str, int, int]]:
    """Phases in order of issue, each with its first op and the one after its last."""
    found, start = [], 0
    for phase, ops in groupby(op.phase for op in trace.ops):
        end = start + len(list(ops))
        found.append((phase.value, start, end))
        start = end
    return found


def bytes_by_op(run: Run) -> dict[str, list[int]]:
    """Bytes held during each op: predicted in every tier in use, and if everything were kept."""
    ops = len(run.trace.ops)
    kept = replace(run.plan, assignments=(), layer_algorithms=())
    found = {"everything kept": curve(run.trace, kept, run.hardware.allocator)}
    found["predicted"] = list(run.predicted.curve)
    spans = intervals(run.trace, run.plan)
    for tier, name in ((Tier.HOST, "in host memory"), (Tier.DISK, "on disk")):
        found[name] = tier_curve(spans, tier, ops)
    return {name: held for name, held in found.items() if any(held)}


def envelope(held: Sequence[int]) -> tuple[list[int], list[int]]:
    """Edges and heights of a few steps that are nowhere below ``held``."""
    width = -(-len(held) // _STEPS_ACROSS) or 1
    edges = [*range(0, len(held), width), len(held)]
    return edges, [max(held[start : start + width]) for start in edges[:-1]]


def dots(held: Sequence[Held]) -> list[Held]:
    """As many measurements as can be told apart: of neighbours the largest."""
    width = -(-len(held) // _DOTS_ACROSS) or 1
    groups = (held[start : start + width] for start in range(0, len(held), width))
    return [max(group, key=lambda item: item.nbytes) for group in groups]


def _resolved(bars: list[Bar], end: float) -> list[Bar]:
    """The bars, those that touch joined; too many become cells that share time as they did."""
    cell = end / _BARS_ACROSS
    joined = _joined(bars, cell / 1000)
    if len(joined) <= _BARS_ACROSS:
        return joined
    shares = [Counter[str]() for _ in range(_BARS_ACROSS + 1)]
    for bar in joined:
        for index in range(int(bar.start_s / cell), int(bar.end_s / cell) + 1):
            inside = min(bar.end_s, (index + 1) * cell) - max(bar.start_s, index * cell)
            shares[index][bar.kind] += inside  # type: ignore[assignment]
    # What a cell did not show is owed to the next, so that little in each is not nothing in all.
    owed: Counter[str] = Counter()
    chosen: list[Bar] = []
    for index, share in enumerate(shares):
        owed.update(share)
        owed[_IDLE] += max(0.0, cell - share.total())  # type: ignore[assignment]
        kind = max(owed, key=owed.__getitem__)
        owed[kind] -= cell  # type: ignore[assignment]
        chosen.append(Bar(kind, index * cell, (index + 1) * cell))
    return _joined([bar for bar in chosen if bar.kind != _IDLE], cell / 1000)


def _joined(bars: Iterable[Bar], gap: float) -> list[Bar]:
    found: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: (bar.start_s, bar.end_s)):
        last = found[-1] if found else None
        if last and last.kind == bar.kind and bar.start_s - last.end_s <= gap:
            found[-1] = Bar(bar.kind, last.start_s, max(last.end_s, bar.end_s))
        else:
            found.append(bar)
    return found
