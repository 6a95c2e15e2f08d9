"""How long managed blocks are on the device: longer where the memory set aside for them allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from belady.ir.plan import Managed
from belady.ir.residency import next_anchor, reload_end
from belady.planners.moves import Case
from belady.planners.spread import Bytes, Times, first_short, held_bytes, last_short


class Lengthened:
    """Ways out that may end later and ways back that begin earlier, within ``extra_bytes``.

    Parameters
    ----------
    moves
        Each with its blocks on the device for as few ops as may be.
    times
        Seconds at which compute is expected to reach each boundary.
    extra_bytes
        Bytes for blocks beyond those that ``moves`` need as they are.

    Attributes
    ----------
    moves
        The same moves with other times.
    """

    def __init__(
        self, case: Case, moves: Mapping[int, Managed], times: Times, extra_bytes: int
    ) -> None:
        self._case = case
        self._times = times
        self._anchors = np.array(case.trace.anchors or range(len(case.trace.ops) + 1))
        self.moves = dict(moves)
        held: Bytes = np.zeros(len(case.trace.ops) + 2, dtype=np.int64)
        for value, move in moves.items():
            nbytes, read = held_bytes(case, value), case.trace.values[value]
            # At the boundary where a block has left, another may have come already.
            held[move.prefetch_out_at : move.gone_by + 1] += nbytes
            held[move.prefetch_in_at : reload_end(case.trace, read)] += nbytes
        self._slack = held.max(initial=0) + extra_bytes - held
        self._delay()
        self._hasten()

    def _delay(self) -> None:
        """Let compute wait for each way out only when it is expected to have ended."""
        links = self._case.hardware.managed
        assert links is not None
        ends: dict[int, float] = {}
        lane = 0.0
        for value in sorted(self.moves, key=lambda v: (self.moves[v].prefetch_out_at, v)):
            begun = max(lane, float(self._times[self.moves[value].prefetch_out_at]))
            lane = ends[value] = begun + links.out.seconds(self._nbytes(value))
        # The last comes first: who waits for it has waited for those before it.
        for value in reversed(ends):
            move, nbytes = self.moves[value], held_bytes(self._case, value)
            ended = self._next(int(np.searchsorted(self._times, ends[value])))
            wanted = min(ended, move.prefetch_in_at - 1)
            until = first_short(self._slack, move.gone_by + 1, wanted + 1, nbytes) - 1
            until = self._last(until)
            if until > move.gone_by:
                self._slack[move.gone_by + 1 : until + 1] -= nbytes
                self.moves[value] = replace(move, gone_by=until)

    def _hasten(self) -> None:
        """Begin each way back so early that all after it on the link are in time."""
        links = self._case.hardware.managed
        assert links is not None
        order = sorted(self.moves, key=lambda v: (self.moves[v].ready_by, v))
        due: dict[int, float] = {}
        lane = np.inf
        for value in reversed(order):
            end = min(lane, float(self._times[self.moves[value].ready_by]))
            lane = due[value] = end - links.back.seconds(self._nbytes(value))
        for value in order:
            move, nbytes = self.moves[value], held_bytes(self._case, value)
            begun = self._last(int(np.searchsorted(self._times, due[value], side="right")) - 1)
            # Never before the bytes are gone: then it would not have left at all.
            first = max(begun, self._gone(value) + 1)
            since = self._next(last_short(self._slack, first, move.prefetch_in_at, nbytes))
            if since < move.prefetch_in_at:
                self._slack[since : move.prefetch_in_at] -= nbytes
                self.moves[value] = replace(move, prefetch_in_at=since)

    def _gone(self, value: int) -> int:
        trace = self._case.trace
        released = trace.storages[trace.values[value].storage].released
        return max(next_anchor(trace, self.moves[value].gone_by), released)

    def _nbytes(self, value: int) -> int:
        trace = self._case.trace
        return trace.storages[trace.values[value].storage].nbytes

    def _last(self, boundary: int) -> int:
        at = int(np.searchsorted(self._anchors, boundary, side="right")) - 1
        return int(self._anchors[at]) if at >= 0 else 0

    def _next(self, boundary: int) -> int:
        return next_anchor(self._case.trace, boundary)
