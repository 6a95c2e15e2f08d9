"""The linear program behind `belady.simulate.bound`, as plain rows.

Time is cut where each sampled op starts and where it ends. Segment ``2k`` lies before sample
``k``, segment ``2k + 1`` is that sample running, and the last segment lies after all of them;
segment ``j`` runs from moment ``j`` to moment ``j + 1``.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from belady.simulate.lanes import duplex_share
from belady.simulate.movable import Movable, Ports


@dataclass(frozen=True, slots=True)
class Segments:
    """Where time is cut.

    Attributes
    ----------
    samples
        Ops around which time is cut, ascending.
    excess
        Bytes that must be away during each of them.
    earliest
        Seconds before which no plan starts them, and before which none ends the iteration.
    busy
        Seconds of compute that the ops before each boundary take.
    """

    samples: list[int]
    excess: list[int]
    earliest: list[float]
    busy: list[float]

    @property
    def edges(self) -> list[int]:
        """First op of each segment, and the number of ops."""
        around = [edge for op in self.samples for edge in (op, op + 1)]
        return [0, *around, len(self.busy) - 1]

    def moments(self) -> list[float]:
        """Seconds before which no plan reaches each moment."""
        found = [0.0]
        for op, start in zip(self.samples, self.earliest, strict=False):
            found += [start, start + self.busy[op + 1] - self.busy[op]]
        return [*found, self.earliest[-1]]

    def between(self, boundary: int) -> int:
        """Segment of the work that is free to go on at ``boundary``, between two samples."""
        return 2 * bisect_left(self.samples, boundary)


@dataclass(slots=True)
class Relaxation:
    """Minimise variable ``objective`` with ``at_most @ x <= limits`` and ``equal @ x == 0``.

    Times are in units of ``unit_s`` seconds.
    """

    unit_s: float
    objective: int = 0
    bounds: list[tuple[float, float | None]] = field(default_factory=list)
    at_most: list[dict[int, float]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    equal: list[dict[int, float]] = field(default_factory=list)

    def variable(self, low: float = 0.0, high: float | None = None) -> int:
        """Add a variable."""
        self.bounds.append((low, high))
        return len(self.bounds) - 1

    def limit(self, row: dict[int, float], most: float) -> None:
        """Add a row of ``at_most``."""
        self.at_most.append(row)
        self.limits.append(most)


@dataclass(slots=True)
class _Group:
    """Values that leave and return in the same segments, at about the same cost per byte.

    ``out`` and ``back`` hold the variable of each segment in which bytes may be copied, ``again``
    the one of the bytes that are made again, if that may be.
    """

    nbytes: int
    out_s: float  # per byte, as in_s and again_s
    in_s: float
    again_s: float
    release: int
    deadline: int
    window: tuple[int, int]  # samples during which it may be away
    out: dict[int, int] = field(default_factory=dict)
    back: dict[int, int] = field(default_factory=dict)
    again: int = -1


def relax(segments: Segments, items: list[Movable], links: Ports) -> Relaxation:
    """Write the linear program. Bytes are in units of the largest excess."""
    unit = float(max(segments.excess))
    problem = Relaxation(unit_s=segments.earliest[-1] or 1.0)
    # [moments] no plan reaches op i before the iteration that keeps everything does.
    moments = [problem.variable(at / problem.unit_s) for at in segments.moments()]
    problem.bounds[0] = (0.0, 0.0)
    problem.objective = moments[-1]
    groups = _groups(segments, items)
    away: list[dict[int, float]] = [{} for _ in segments.samples]
    for group in groups:
        _flow(problem, segments, group, unit, away)
    # [memory] during each sampled op, what is over the budget is away.
    for row, excess in zip(away, segments.excess, strict=True):
        problem.limit(row, -excess / unit)
    edges = segments.edges
    for index in range(len(moments) - 1):
        # [compute] a segment lasts at least as long as its ops compute and replays run.
        span = (segments.busy[edges[index + 1]] - segments.busy[edges[index]]) / problem.unit_s
        scale = unit / problem.unit_s
        replays = {
            g.again: g.again_s * scale
            for g in groups
            if g.again >= 0 and segments.between(g.deadline) == index
        }
        problem.limit({index: 1.0, index + 1: -1.0} | replays, -span)
        if links.out:
            _lanes(problem, segments, groups, links, index, scale)
    return problem


def _groups(segments: Segments, items: list[Movable]) -> list[_Group]:
    groups: dict[tuple[int, ...], _Group] = {}
    samples = segments.samples
    for item in items:
        window = (bisect_left(samples, item.start), bisect_left(samples, item.end))
        if window[0] >= window[1]:
            continue
        out_s, in_s = item.out_s / item.nbytes, item.in_s / item.nbytes
        again_s = item.again_s / item.nbytes
        # Of merged values the cheapest and loosest stands for all: the bound can only fall.
        key = (
            segments.between(item.release),
            *window,
            segments.between(item.deadline),
            *(_about(seconds) for seconds in (out_s, in_s, again_s)),
        )
        new = _Group(item.nbytes, out_s, in_s, again_s, item.release, item.deadline, window)
        old = groups.setdefault(key, new)
        if old is not new:
            old.nbytes += item.nbytes
            old.out_s, old.in_s = min(old.out_s, out_s), min(old.in_s, in_s)
            old.again_s = min(old.again_s, again_s)
            old.release = min(old.release, item.release)
            old.deadline = max(old.deadline, item.deadline)
    return list(groups.values())


def _about(seconds: float) -> int:
    """The same for durations that are nearly the same."""
    if seconds == math.inf:
        return sys.maxsize
    return round(5 * math.log(seconds)) if seconds > 0 else -sys.maxsize


def _flow(
    problem: Relaxation,
    segments: Segments,
    group: _Group,
    unit: float,
    away: list[dict[int, float]],
) -> None:
    """Bytes of one group: dropped and made again, or out and back by copies."""
    first, last = group.window
    if group.again_s < math.inf:
        group.again = problem.variable(high=group.nbytes / unit)
        for sample in range(first, last):
            away[sample][group.again] = -1.0
    if group.out_s == math.inf:
        return
    opens, closes = segments.between(group.release), segments.between(group.deadline)
    group.out = {j: problem.variable() for j in range(opens, 2 * last - 1)}
    group.back = {j: problem.variable() for j in range(2 * first + 2, closes + 1)}
    # [flow] away during a sample is what was copied out before it starts, less what is copied in
    # before it ends: compute waits where bytes are freed, and they are taken in stream order.
    row = {group.out[j]: 1.0 for j in range(opens, 2 * first + 1)}
    for sample in range(first, last):
        now = problem.variable(high=group.nbytes / unit)
        away[sample][now] = -1.0
        if group.again >= 0:
            # [once] what is dropped is not copied.
            problem.limit({now: 1.0, group.again: 1.0}, group.nbytes / unit)
        problem.equal.append({now: -1.0, **row})
        row = {now: 1.0}
        if sample + 1 < last:
            row |= {group.out[j]: 1.0 for j in (2 * sample + 1, 2 * sample + 2)}
            row |= {group.back[j]: -1.0 for j in (2 * sample + 2, 2 * sample + 3)}
    # [return] what is away comes back by its first read.
    problem.equal.append(row | {group.back[j]: -1.0 for j in range(2 * last, closes + 1)})


def _lanes(
    problem: Relaxation,
    segments: Segments,
    groups: list[_Group],
    links: Ports,
    index: int,
    scale: float,
) -> None:
    """Time on the links in one segment; ``scale`` turns seconds per byte into our units."""
    low, high = segments.edges[index], segments.edges[index + 1]
    busy = [seconds / problem.unit_s for seconds in segments.busy[low : high + 1]]
    out = [(g, {g.out[index]: g.out_s * scale}) for g in groups if index in g.out]
    back = [(g, {g.back[index]: g.in_s * scale}) for g in groups if index in g.back]
    # [release] what is saved late in the segment has only the rest of it to leave.
    for release in sorted({g.release for g, _ in out if g.release > low}):
        late = _merge(use for g, use in out if g.release >= release)
        _within(problem, index, late, len(links.out), busy[release - low] - busy[0])
    # [deadline] what is read early in the segment must be back by then.
    for deadline in sorted({g.deadline for g, _ in back if g.deadline < high}):
        early = _merge(use for g, use in back if g.deadline <= deadline)
        _within(problem, index, early, len(links.back), busy[-1] - busy[deadline - low])
    # [bandwidth] the copies of a direction take no longer than the segment, lane by lane.
    leave, enter = _merge(use for _, use in out), _merge(use for _, use in back)
    _within(problem, index, leave, len(links.out))
    _within(problem, index, enter, len(links.back))
    if leave and enter and len(links.out) == len(links.back) == 1:
        _duplex(problem, index, leave, enter, links)


def _duplex(
    problem: Relaxation,
    index: int,
    leave: dict[int, float],
    enter: dict[int, float],
    links: Ports,
) -> None:
    """Keep the progress of both directions within what a shared path allows."""
    if links.out[0].path != links.back[0].path:
        return
    out, back = duplex_share(links.out[0]), duplex_share(links.back[0])
    if out + back < 1:
        # [half duplex] taking turns is the best that can be done.
        _within(problem, index, leave | enter)
        return
    # [duplex] mean progress lies in the hull of (0,0), (1,0), (out, back) and (0,1).
    for share_out, share_back, most in ((back, 1 - out, back), (1 - back, out, out)):
        row = {v: x * share_out / most for v, x in leave.items()}
        row |= {v: x * share_back / most for v, x in enter.items()}
        _within(problem, index, row)


def _within(
    problem: Relaxation, index: int, row: dict[int, float], lanes: int = 1, taken: float = 0.0
) -> None:
    """Add ``row <= lanes * (length of segment - taken)``."""
    if row:
        spans = {index: float(lanes), index + 1: -float(lanes)}
        problem.limit(row | spans, -lanes * taken)


def _merge(rows: Iterable[dict[int, float]]) -> dict[int, float]:
    return {variable: factor for row in rows for variable, factor in row.items()}
