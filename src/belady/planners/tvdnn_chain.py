"""Chains, where the program of tvDNN is a choice of gaps and no more.

In a chain backward reads last what forward saved first: gaps lie one within the other. The bytes of
those that are used go and come as on a stack. During each op those away are the outermost ones, as
few as make room. So all that is left to decide is which gaps are used:

- Let the **peak** be the op with the most bytes over the budget. If a set makes room at every op,
  then so do those of its gaps alone that are away at the peak: they are its outermost ones, and no
  op needs more. So there is a best set that is away at the peak as a whole, and just makes room.
- Before the peak compute waits for copy-outs only, after it for copy-ins only. The two **sides**
  share nothing but the set.
- Backwards in time a copy-in is a copy-out: it may begin at the read, and is over at the boundary
  where memory gets short. So both sides are the same problem.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np

from belady.planners.spread import Bytes, Times
from belady.planners.tvdnn import Gap, Swapping


@dataclass(frozen=True, slots=True)
class Side:
    """Copies on one side of the peak, as a chain's gaps are ordered; clocks run towards the peak.

    A **row** is a boundary of issue at which more bytes have to be away than before.

    Attributes
    ----------
    begin
        When the copy of each gap may begin, if compute has not stalled.
    seconds
        What it takes.
    due, edge
        Clock and boundary of each row.
    need
        Bytes that must be away then.
    among
        Gaps of which they may be: so many, the outermost.
    passed
        For each gap the rows before its copy may begin; one more entry counts all.
    end, peak
        Clock and boundary of the peak.
    """

    begin: Times
    seconds: Times
    due: Times
    edge: Bytes
    need: Bytes
    among: Bytes
    passed: Sequence[int]
    end: float
    peak: int

    def edges(self, used: Sequence[int], nbytes: Bytes) -> list[int]:
        """Boundary at which the bytes of each gap that is used have to be away."""
        sums = np.cumsum(nbytes[used])
        # The bytes before its own do not suffice at the first row that needs it.
        rows = np.searchsorted(self.need, sums - nbytes[used], side="right")
        return [int(self.edge[row]) if row < len(self.edge) else self.peak for row in rows]


@dataclass(frozen=True, slots=True)
class Chain:
    """The gaps around the peak, the outermost first.

    Attributes
    ----------
    gaps
        Which of `belady.planners.tvdnn.Swapping.gaps` they are.
    nbytes
        Theirs.
    need
        Bytes that must be away at the peak.
    sides
        Before the peak and after it.
    """

    gaps: Sequence[int]
    nbytes: Bytes
    need: int
    sides: tuple[Side, Side]

    def schedule(self, used: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Boundaries at which the bytes of the used gaps go and come, by index in the trace."""
        go, come = (side.edges(used, self.nbytes) for side in self.sides)
        return {
            self.gaps[index]: (free, -back)
            for index, free, back in zip(used, go, come, strict=True)
        }


def chain_of(swapping: Swapping) -> Chain | None:
    """The chain that a trace is; None if it is none, or a direction has more than one lane."""
    gaps = swapping.gaps
    nested = all(one.gone <= two.gone and one.back >= two.back for one, two in pairwise(gaps))
    ways = {(tuple(gap.out_s), tuple(gap.in_s)) for gap in gaps if gap.alone}
    lanes = [len(lanes) for way in ways for lanes in way]
    if not nested or lanes != [1, 1] or not all(gap.alone for gap in gaps):
        return None
    peak = int(swapping.over.argmax())
    around = [index for index, gap in enumerate(gaps) if gap.gone <= peak < gap.back]
    inner = [gaps[index] for index in around]
    steps = swapping.steps
    at = next(index for index, (_, _, ops) in enumerate(steps) if peak in ops)
    needs = [_needs(ops, swapping.over, inner) for _, _, ops in steps]
    done, resumed = swapping.times
    before = _side(
        [(gap.out, float(done[gap.out]), sum(gap.out_s.values())) for gap in inner],
        [(steps[k][0], float(resumed[steps[k][0]]), needs[k]) for k in range(at + 1)],
    )
    after = _side(
        [(-gap.back, -float(resumed[gap.back]), sum(gap.in_s.values())) for gap in inner],
        [
            (-steps[k][1], -float(done[steps[k][1]]), needs[k])
            for k in reversed(range(at, len(steps)))
        ],
    )
    need = _needs([peak], swapping.over, inner)[len(inner)]
    nbytes = np.array([gap.nbytes for gap in inner], dtype=np.int64)
    return Chain(around, nbytes, need, (before, after))


def _needs(ops: Iterable[int], over: Bytes, gaps: Sequence[Gap]) -> dict[int, int]:
    """Bytes that must be away, by how many gaps may be; in units that divide the bytes of all."""
    needs: dict[int, int] = {}
    for op in ops:
        among = sum(gap.gone <= op < gap.back for gap in gaps)
        unit = gcd(*(gap.nbytes for gap in gaps[:among]))
        needs[among] = max(needs.get(among, 0), -(-int(over[op]) // unit) * unit)
    return needs


def _side(
    copies: Sequence[tuple[int, float, float]], steps: Sequence[tuple[int, float, dict[int, int]]]
) -> Side:
    """Copies as boundary, clock and seconds; steps up to the peak as boundary, clock and needs."""
    rows: list[tuple[int, float, int, int]] = []
    for edge, clock, needs in steps:
        for among, need in sorted(needs.items()):
            # What had to be away before still is.
            if not rows or need > rows[-1][3]:
                rows.append((edge, clock, among, need))
    edges, due, among_, needed = zip(*rows, strict=True)
    boundaries, begin, seconds = zip(*copies, strict=True)
    return Side(
        begin=np.array(begin),
        seconds=np.array(seconds),
        due=np.array(due),
        edge=np.array(edges, dtype=np.int64),
        need=np.array(needed, dtype=np.int64),
        among=np.array(among_, dtype=np.int64),
        passed=[*(bisect_left(edges, boundary) for boundary in boundaries), len(rows)],
        end=steps[-1][1],
        peak=steps[-1][0],
    )
