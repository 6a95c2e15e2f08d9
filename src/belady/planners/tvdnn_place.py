"""When the gaps that tvDNN's heuristic uses begin and end, as both buses and memory allow."""

from __future__ import annotations

import sys
from math import inf

import numpy as np

from belady.ir.plan import Offload
from belady.ir.timeline import Lane
from belady.ir.trace import Trace
from belady.planners.spread import Bytes, Times
from belady.planners.tvdnn import Gap


def place(trace: Trace, gaps: list[Gap], times: Times, slack: Bytes) -> dict[int, Offload]:
    """Moves of these gaps, in order of copy-out, as both buses and memory allow.

    Parameters
    ----------
    times
        Seconds at which compute is expected to reach each boundary.
    slack
        Bytes left during each op if all are away for as long as may be; what is used is taken off.
    """
    anchors = np.array(trace.anchors or range(len(trace.ops) + 1))
    frees = _frees(gaps, times, slack, anchors)
    backs = _returns(gaps, frees, times, slack, anchors)
    moves: dict[int, Offload] = {}
    for gap, free, back in zip(gaps, frees, backs, strict=True):
        if free < back:
            moves |= gap.away(free, back)
    return dict(sorted(moves.items()))


def _frees(gaps: list[Gap], times: Times, slack: Bytes, anchors: Bytes) -> list[int]:
    """Boundary at which each goes: when its copy-out has ended, sooner where memory is short."""
    ends: list[float] = []
    lanes: dict[Lane, float] = {}
    for gap in gaps:
        end = float(times[gap.out])
        for lane, seconds in gap.out_s.items():
            lanes[lane] = end = max(end, lanes.get(lane, 0.0)) + seconds
        ends.append(end)
    frees = [gap.gone for gap in gaps]
    # Who waits for the last copy has waited for those before it, so these need not stay longer.
    for index in reversed(range(len(gaps))):
        gap = gaps[index]
        wanted = min(_from(anchors, int(np.searchsorted(times, ends[index]))), gap.back)
        short = np.flatnonzero(slack[gap.gone : wanted] < gap.nbytes)
        until = _until(anchors, gap.gone + int(short[0])) if len(short) else wanted
        if until > gap.gone:
            slack[gap.gone : until] -= gap.nbytes
            frees[index] = until
    return frees


def _returns(
    gaps: list[Gap], frees: list[int], times: Times, slack: Bytes, anchors: Bytes
) -> list[int]:
    """Boundary at which each comes: just early enough, later where memory is short."""
    starts: dict[int, float] = {}
    lanes: dict[Lane, float] = {}
    order = sorted(range(len(gaps)), key=lambda index: (gaps[index].back, index))
    for index in reversed(order):
        start = float(times[gaps[index].back])
        for lane, seconds in reversed(list(gaps[index].in_s.items())):
            lanes[lane] = start = min(start, lanes.get(lane, inf)) - seconds
        starts[index] = start
    backs = [gap.back for gap in gaps]
    for index in order:
        gap, free = gaps[index], frees[index]
        wanted = int(np.searchsorted(times, starts[index], side="right")) - 1
        wanted = max(_until(anchors, wanted), free)
        short = np.flatnonzero(slack[wanted : gap.back] < gap.nbytes)
        since = _from(anchors, wanted + int(short[-1]) + 1) if len(short) else wanted
        if gap.alone and since < gap.back:
            slack[since : gap.back] -= gap.nbytes
            backs[index] = since
    return backs


def _from(anchors: Bytes, boundary: int) -> int:
    """First anchor at or after a boundary, or a boundary beyond all."""
    at = int(np.searchsorted(anchors, boundary))
    return int(anchors[at]) if at < len(anchors) else sys.maxsize


def _until(anchors: Bytes, boundary: int) -> int:
    """Last anchor at or before a boundary, or -1."""
    at = int(np.searchsorted(anchors, boundary, side="right")) - 1
    return int(anchors[at]) if at >= 0 else -1
