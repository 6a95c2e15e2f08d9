"""What both policies of tvDNN share: the gaps in which a storage may be away, and its moves.

Certain, from the abstract of the poster: tvDNN swaps memory objects between GPU and CPU by a
schedule that an integer linear program (optimal) or a heuristic (suboptimal) makes, and runs large
ops in sections. Neither is written down there, so what `belady.planners.tvdnn_ilp` and
`belady.planners.tvdnn_greedy` do is a reconstruction. Sections are not in it: they are applied to a
trace before it is planned, and their slices are saved values like any other.

=========================== ================================================================
notion                      here
=========================== ================================================================
memory object               a storage whose saved values may all move
gap between two touches     from the last use in forward to the first read in backward
swap-out, swap-in           the copies of an Offload
budget M                    the largest peak that the allocator's margin leaves, less what
                            cannot move and the workspace, op by op
=========================== ================================================================

Source
------
::

    @inproceedings{park2018tvdnn,
      title     = {{POSTER}: Transparent {GPU} Memory Management for {DNNs}},
      author    = {Park, Jungho and Cho, Hyungmin and Jung, Wookeun and Lee, Jaejin},
      booktitle = {Proceedings of the 23rd ACM SIGPLAN Symposium on Principles and Practice of
                   Parallel Programming (PPoPP)},
      pages     = {411--412},
      year      = {2018},
      doi       = {10.1145/3178487.3178531}
    }
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from belady.ir.hardware import Link
from belady.ir.plan import Offload, Plan
from belady.ir.timeline import Lane
from belady.planners.base import Draft, assemble
from belady.planners.floor import FLOOR
from belady.planners.moves import Case, read_by
from belady.planners.spread import Bytes, Times, held_bytes, slack_of
from belady.simulate.engine import simulate
from belady.simulate.lanes import duplex_share
from belady.simulate.routes import routes

KEPT = "kept: the budget has room for it between its uses"


@dataclass(frozen=True, slots=True)
class Gap:
    """The ops ``gone <= i < back`` during which a storage may be away.

    Attributes
    ----------
    moves
        For each of its saved values the move that keeps it away for longest.
    nbytes
        Device bytes, allocator rounding included.
    out
        Boundary at which the copy-out is issued.
    gone, back
        Boundaries between which the bytes can be away.
    out_s, in_s
        Seconds that the copies take on each lane alone; of a copy-out the hop that leaves the
        device, which is all that compute ever waits for.
    """

    moves: Mapping[int, Offload]
    nbytes: int
    out: int
    gone: int
    back: int
    out_s: Mapping[Lane, float]
    in_s: Mapping[Lane, float]

    @property
    def alone(self) -> bool:
        """Whether it may come back before it is read: several values would come back apart."""
        return len(self.moves) == 1

    def away(self, free: int, back: int) -> dict[int, Offload]:
        """Moves that let go of the bytes at ``free`` and, if it is `alone`, return at ``back``."""
        return {
            value: replace(
                move,
                free_at=max(move.free_at, free),
                copy_in_at=min(move.copy_in_at, back) if self.alone else move.copy_in_at,
            )
            for value, move in self.moves.items()
        }


class Swapping:
    """What a swap schedule decides about: the gaps of a trace, and the bytes over the budget.

    Attributes
    ----------
    floor
        Draft in which all gaps are used.
    gaps
        In the order in which their copy-outs are issued.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.floor = FLOOR.draft(case)
        by_storage: dict[int, dict[int, Offload]] = {}
        for value, move in self.floor.moves.items():
            by_storage.setdefault(case.trace.values[value].storage, {})[value] = move
        found = [_gap(case, moves) for moves in by_storage.values()]
        self.gaps = tuple(sorted(found, key=lambda gap: (gap.out, gap.back, min(gap.moves))))

    @cached_property
    def slack(self) -> Bytes:
        """Bytes left during each op when all gaps are used; negative where that is too little."""
        return slack_of(self.case, assemble(self.case, self.floor))

    @cached_property
    def over(self) -> Bytes:
        """Bytes that must be away during each op; where positive, some gap has to be used."""
        change = np.zeros(len(self.case.trace.ops) + 1, dtype=np.int64)
        for gap in self.gaps:
            change[gap.gone] += gap.nbytes
            change[gap.back] -= gap.nbytes
        return np.cumsum(change[:-1]) - self.slack

    @cached_property
    def steps(self) -> Sequence[tuple[int, int, Sequence[int]]]:
        """Anchors around each step, and the ops in it at which memory is short."""
        trace = self.case.trace
        edges = sorted({0, *(trace.anchors or range(len(trace.ops) + 1)), len(trace.ops)})
        ops: dict[int, list[int]] = {}
        for op in np.flatnonzero(self.over > 0):
            ops.setdefault(bisect_right(edges, int(op)) - 1, []).append(int(op))
        return [(edges[edge], edges[edge + 1], short) for edge, short in sorted(ops.items())]

    @cached_property
    def times(self) -> tuple[Times, Times]:
        """Seconds at which compute is done with the ops before each boundary, and would go on.

        The host issues the next op meanwhile; on a CPU it does so only afterwards.
        """
        trace = self.case.trace
        keep = simulate(
            trace, self.case.hardware, Plan(trace.fingerprint, "keep", self.case.budget)
        )
        spans = [span for span in keep.spans if span.lane is Lane.COMPUTE]
        done = np.array([0.0, *(span.end_s for span in spans)])
        if trace.device == "cpu":
            return done, done
        return done, np.array([*(span.start_s for span in spans), keep.seconds])

    @property
    def keep_seconds(self) -> float:
        """Seconds of the iteration that keeps everything."""
        return float(self.times[0][-1])

    @cached_property
    def links(self) -> tuple[dict[Lane, Link], dict[Lane, Link]]:
        """Links by which values leave the device, and by which they return."""
        out: dict[Lane, Link] = {}
        back: dict[Lane, Link] = {}
        for tier in {move.tier: None for gap in self.gaps for move in gap.moves.values()}:
            there, again = routes(self.case.hardware, tier)
            # Compute never waits for a hop beyond the first.
            out |= dict(there[:1])
            back |= dict(again)
        return out, back

    def draft(self, planner: str, moves: Mapping[int, Offload], reason: str) -> Draft:
        """The choices, each with this reason."""
        return Draft(planner, KEPT, dict.fromkeys(moves, reason), moves)


def duplex_weights(out: Link, back: Link) -> Iterator[tuple[float, float]]:
    """Weights with which the copies of both directions share the time."""
    if out.path != back.path:
        return
    one, other = duplex_share(out), duplex_share(back)
    if one + other <= 1:
        # [half duplex] taking turns is the best that can be done.
        yield 1.0, 1.0
        return
    # Mean progress lies in the hull of (0,0), (1,0), (one, other) and (0,1).
    if one < 1:
        yield 1.0, (1 - one) / other
    if other < 1:
        yield (1 - other) / one, 1.0


def _gap(case: Case, moves: Mapping[int, Offload]) -> Gap:
    trace = case.trace
    values = {value: trace.values[value] for value in moves}
    read = [value.first_read for value in values.values() if value.first_read is not None]
    storage = trace.storages[next(iter(values.values())).storage]
    out_s: dict[Lane, float] = {}
    in_s: dict[Lane, float] = {}
    for move in moves.values():
        there, again = routes(case.hardware, move.tier)
        for lane, link in there[:1]:
            out_s[lane] = out_s.get(lane, 0.0) + link.seconds(storage.nbytes)
        for lane, link in again:
            in_s[lane] = in_s.get(lane, 0.0) + link.seconds(storage.nbytes)
    return Gap(
        moves=moves,
        nbytes=held_bytes(case, next(iter(moves))),
        out=max(move.copy_out_after + 1 for move in moves.values()),
        gone=max(storage.released, *(move.free_at for move in moves.values())),
        back=min(read) if read else max(read_by(value) for value in values.values()),
        out_s=out_s,
        in_s=in_s,
    )
