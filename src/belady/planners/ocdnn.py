"""OC-DNN's policies: ``ocdnn_naive`` and ``ocdnn_opt``.

How its notions map onto a Trace:

=========================== ================================================================
paper                       here
=========================== ================================================================
all in managed memory       what autograd saves may go into managed blocks (`Managed`); it does
                            when it first leaves the device. A managed page that never leaves
                            is as good as an ordinary one, so such a value is kept
oc-caffe-naive: eviction    where memory runs short, what was used longest ago leaves, and
by the driver               compute waits for it: ``gone_by`` = ``prefetch_out_at``
oc-caffe-naive: page        ``faults``: the op that reads pays, by the rate measured for faults
faults
oc-caffe-opt: eviction      ``prefetch_out_at`` after the last op of forward that needs it; those
hint for the source after   read last in backward go, as far as the budget asks for
use
oc-caffe-opt: prefetch of   ``prefetch_in_at`` early enough for the link, as far as the memory set
the destination             aside for blocks allows
=========================== ================================================================

The driver evicts when more is managed than the device holds. No engine lets it come to that: it can
hang a device, for all who use it. So what the driver would do is written into the plan, and carried
out by explicit prefetch; the moments are those at which memory runs short, not the driver's own.
Blocks have memory of their own (`belady.ir.curves.managed_room`), of which both policies ask for
no more than they use. Not expressed: F2M and M2F (input files), weights in managed memory.

Source
------
::

    @inproceedings{awan2018ocdnn,
      title     = {{OC-DNN}: Exploiting Advanced Unified Memory Capabilities in {CUDA} 9 and {Volta}
                   {GPUs} for Out-of-Core {DNN} Training},
      author    = {Awan, Ammar Ahmad and Chu, Ching-Hsiang and Subramoni, Hari and Lu, Xiaoyi and
                   Panda, Dhabaleswar K.},
      booktitle = {25th IEEE International Conference on High Performance Computing (HiPC)},
      year      = {2018},
      doi       = {10.1109/HiPC.2018.00024}
    }
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from belady.errors import InfeasibleBudgetError
from belady.ir.curves import curve, managed_room
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Managed, Plan
from belady.ir.residency import next_anchor
from belady.ir.trace import Tier, Trace
from belady.planners.base import Draft, assemble, attempt, finish
from belady.planners.moves import Case, Schedule, movable, place, read_by, tier_for
from belady.planners.ocdnn_blocks import Lengthened
from belady.planners.spread import Bytes, alone, boundary_times, held_bytes, keep, slack_of
from belady.planners.traits import Traits
from belady.simulate.engine import simulate

# Memory for blocks beyond the least, in multiples of the largest value.
_EXTRAS = (0.0, 2.0, 6.0)
_ROUNDS = 2
_NOTHING = 0.002


@dataclass(frozen=True, slots=True)
class Ocdnn:
    """Values in managed memory, moved by prefetch or left to the driver.

    Attributes
    ----------
    prefetches
        Whether anything is prefetched; if not, pages fault in.
    """

    name: str
    prefetches: bool
    version: int = 1
    traits: Traits = Traits(lean_as_floor=False, slices_modules=True, managed=True)

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`; every plan of these policies is exact."""
        case = Case(trace, hardware, budget, exact)
        planner = f"{self.name}/{self.version}"
        kept = Draft(planner, "kept: everything fits in device memory")
        made = attempt(case, kept)
        if made is not None:
            return made
        if hardware.managed is None:
            try:
                return finish(case, kept)
            except InfeasibleBudgetError as error:
                error.add_note(f"policy {self.name!r} moves nothing here: {hardware.no_managed}")
                raise
        least = self._least(case, planner)
        # Blocks have memory of their own, so moving can take more of it than keeping.
        last = finish(case, min(least, kept, key=lambda draft: _peak(case, draft)))
        return (self._best(case, least) if self.prefetches else self._evicted(case, least)) or last

    def _least(self, case: Case, planner: str) -> Draft:
        """All that may move does, gone as soon and back as late as may be."""
        trace = case.trace
        values = movable(trace)
        tiers = tier_for(case, values)
        denied = {trace.values[v].storage for v in values if tiers.get(v) is not Tier.HOST}
        found: dict[int, Managed] = {}
        for index in values:
            value = trace.values[index]
            start = max(value.first_save, trace.storages[value.storage].released)
            start = value.first_save if not self.prefetches else start
            move = place(trace, index, Tier.HOST, Schedule(start - 1, start + 1, read_by(value)))
            if move is None:
                denied.add(value.storage)
            else:
                times = (move.copy_out_after + 1, move.free_at, move.copy_in_at, move.ready_by)
                found[index] = _managed(times, faults=not self.prefetches)
        moved = {v: it for v, it in found.items() if trace.values[v].storage not in denied}
        return _moving(Draft(planner, "kept: the budget has room for it"), moved)

    def _best(self, case: Case, least: Draft) -> Plan | None:
        """The fastest of some ways to share memory out between values that stay and blocks."""
        best: Plan | None = None
        largest = max((held_bytes(case, value) for value in least.managed), default=0)
        for extra in _EXTRAS:
            stay = _staying(case, least, int(extra * largest))
            times = boundary_times(case.trace, None)
            for _ in range(_ROUNDS):
                spread = Lengthened(case, stay, times, int(extra * largest))
                made = attempt(case, _moving(least, spread.moves))
                if made is None:
                    break
                if best is None or made.predicted_seconds < best.predicted_seconds:
                    best = made
                timeline = simulate(case.trace, case.hardware, made)
                if timeline.stall_seconds <= _NOTHING * timeline.seconds:
                    return best
                times = boundary_times(case.trace, timeline)
        return best

    def _evicted(self, case: Case, least: Draft) -> Plan | None:
        """What the driver would do when memory runs short; None if that does not work out."""
        room = max((held_bytes(case, value) for value in least.managed), default=0)
        for _ in range(2 * _ROUNDS):
            moves = _evictions(case, least, room)
            if moves is None:
                return None
            draft = _moving(least, moves)
            made = attempt(case, draft)
            if made is not None:
                return made
            room = max(room + 1, _room_of(case, draft))
        return None


OCDNN_NAIVE = Ocdnn("ocdnn_naive", prefetches=False)
OCDNN_OPT = Ocdnn("ocdnn_opt", prefetches=True)


def _moving(draft: Draft, moves: Mapping[int, Managed]) -> Draft:
    """The draft with these values moved and no others."""
    late = "moved: memory runs short, and it is what was used longest ago"
    wanted = "moved: the budget has no room for it meanwhile"
    reasons = {value: late if move.faults else wanted for value, move in moves.items()}
    return replace(draft, managed=moves, reasons=reasons)


def _peak(case: Case, draft: Draft) -> int:
    return max(curve(case.trace, assemble(case, draft), case.hardware.allocator), default=0)


def _room_of(case: Case, draft: Draft) -> int:
    """Bytes that the draft sets aside for blocks."""
    return managed_room(case.trace, assemble(case, draft), case.hardware.allocator)


def _managed(times: tuple[int, int, int, int], *, faults: bool) -> Managed:
    out, gone, back, ready = times
    return Managed(out, gone, ready if faults else back, ready, faults)


def _windows(case: Case, moves: Mapping[int, Managed]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Ops during which torch would hold a value if it stayed, those read first before others."""
    trace = case.trace
    by_read = sorted(alone(trace, moves), key=lambda v: (moves[v].ready_by, v))
    for value in by_read:
        storage = trace.storages[trace.values[value].storage]
        gone = max(next_anchor(trace, moves[value].prefetch_out_at), storage.released)
        yield value, (gone, storage.death)


def _staying(case: Case, least: Draft, extra_bytes: int) -> dict[int, Managed]:
    """What still moves when all stays for which there is room beside ``extra_bytes`` for blocks.

    How much the blocks need follows from what moves, so it is found in rounds.
    """
    windows = dict(_windows(case, least.managed))
    nbytes = {value: held_bytes(case, value) for value in windows}
    room = _room_of(case, least)
    free = slack_of(case, assemble(case, least)) + room
    moves = dict(least.managed)
    for _ in range(_ROUNDS):
        stays = set(keep(windows, nbytes, np.maximum(free - room - extra_bytes, 0), 0.0))
        moves = {value: it for value, it in least.managed.items() if value not in stays}
        room = _room_of(case, _moving(least, moves))
    return moves


def _evictions(case: Case, least: Draft, room: int) -> dict[int, Managed] | None:
    """What leaves, and when, so that torch's bytes fit beside ``room``; None if that cannot be."""
    trace = case.trace
    nothing = assemble(case, replace(least, managed={}))
    short: Bytes = room - slack_of(case, nothing)
    windows = dict(_windows(case, least.managed))
    coming = sorted((start, value) for value, (start, _) in windows.items())
    by_use: list[tuple[int, int]] = []
    moves: dict[int, Managed] = {}
    at = anchor = 0
    anchors = trace.anchors or tuple(range(len(trace.ops) + 1))
    for op in range(len(trace.ops)):
        while anchor < len(anchors) and anchors[anchor] <= op:
            anchor += 1
        while at < len(coming) and coming[at][0] <= op:
            heappush(by_use, coming[at])
            at += 1
        while short[op] > 0:
            if not by_use:
                return None
            _, value = heappop(by_use)
            read = least.managed[value].ready_by
            if read > op:
                out = anchors[anchor - 1]
                moves[value] = Managed(out, out, read, read, faults=True)
                start, end = windows[value]
                short[max(start, out) : end] -= held_bytes(case, value)
    return moves
