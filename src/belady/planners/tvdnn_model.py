"""The integer program behind ``tvdnn_ilp``, as plain rows.

Reconstruction of an ILP for swap schedules, in the terms of the engine. Memory follows from the
order of issue alone (`belady.ir.residency`), so a gap is described by two boundaries: where its
bytes are let go and where they are taken again. Only anchors matter, and only ops at which memory
is short: such ops between two anchors are one **step**. For gap ``g`` and step ``k``::

    z_g   in {0,1}  the gap is used
    u_gk  in {0,1}  compute has waited for its copy-out when the step starts; u_gk <= u_g,k+1 <= z_g
    v_gk  in {0,1}  its bytes are back by the step;                           v_gk <= v_g,k+1
    S_e   >= keep   time of the iteration if compute never stalls after event e; S_e <= S_e+1
    min   S_last + epsilon * (bytes moved / bytes of all gaps)

    [memory]     sum_g bytes_g (u_gk - v_gk) >= bytes over the budget        for each op of step k
    [away]       v_gk <= u_g,k-1
    [bandwidth]  copies that start after event a and are waited for by event e take no longer, on
                 their lane, than compute and stalls leave between a and e:
                 sum_g seconds_g [copied between a and e] <= (time from a to e) + S_e - S_a
    [duplex]     the same for both directions of a shared path, weighed by what each keeps of its
                 rate while the other is busy; half duplex is one sum
    [order]      a lane is first in, first out: copies leave in the order of their saves, return in
                 the order of their reads; of two read at once, who left last comes first.
                 With w, p in [0,1] falling along that order:
                 w_gk >= u_gk >= z_g + w_gk - 1,   p_gk >= v_gk >= z_g + p_gk - 1

Stalls happen at two kinds of events: where bytes are let go, and, after that, where they are read.
Copies are issued before the former, copy-ins between the two. Between any two events the copies
that must happen there fit: that is enough for a lane that serves them in order of their deadlines,
so no variable says when a copy runs. Not modelled: the second hop of a copy-out to disk, and that
a host which is late anyway hides stalls.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd, inf

import numpy as np

from belady.ir.timeline import Lane
from belady.planners.tvdnn import Gap, Swapping, duplex_weights
from belady.planners.tvdnn_solver import Program

# Cost of moving all bytes of all gaps, as a part of the iteration without stalls.
EPSILON = 1e-4
# Parts of that iteration that make a unit of time. Solvers take rows as kept that are missed by
# 1e-6: in units of whole iterations that was seen to cut off the best schedule.
_PARTS = 1000

# Boundary and what happens there: copy-outs are issued, bytes let go, values read.
Event = tuple[int, int]
_ISSUE, _FREE, _READ = 0, 1, 2


@dataclass(slots=True)
class _Choice:
    """Variables of one gap, by step.

    ``first`` and ``last`` are the steps at which it can be away, ``sent`` holds u from the first
    step by which it may be copied, ``back`` holds v from the second of its steps.
    """

    index: int
    gap: Gap
    first: int
    last: int
    used: int
    sent: dict[int, int] = field(default_factory=dict)
    back: dict[int, int] = field(default_factory=dict)

    def sent_by(self, step: int) -> int | None:
        """Variable that says whether the copy-out is over at the start of a step."""
        return self.sent.get(min(step, self.last))


class Model:
    """The program of one case.

    Attributes
    ----------
    swapping
        With at least one op at which memory is short.
    program
        Times are in thousandths of the iteration that keeps everything, which is variable 0.
    """

    def __init__(self, swapping: Swapping) -> None:
        self.swapping = swapping
        self.program = Program()
        self._done, self._resumed = swapping.times
        self._unit = (swapping.keep_seconds or 1.0) / _PARTS
        self._short = swapping.steps
        self._starts = [start for start, _, _ in self._short]
        self._ends = [end for _, end, _ in self._short]
        self.program.variable(_PARTS, _PARTS)
        events = {(start, _FREE) for start in self._starts}
        events |= {(gap.back, _READ) for gap in swapping.gaps}
        self._events = sorted(events)
        for _ in self._events:
            self.program.variable(_PARTS, inf)
        self._choices = [
            choice
            for index, gap in enumerate(swapping.gaps)
            if (choice := self._choice(index, gap)) is not None
        ]
        self._memory()
        self._order()
        self._time()
        self._objective()

    def limit_seconds(self, seconds: float) -> None:
        """Ask for an iteration of at most so many seconds."""
        self.program.high[len(self._events)] = max(_PARTS, seconds / self._unit)

    def seconds(self, objective: float) -> float:
        """Seconds of an iteration that no solution beats, from a bound on the objective."""
        return (objective - EPSILON * _PARTS) * self._unit

    def schedule(self, x: Sequence[float]) -> dict[int, tuple[int, int]]:
        """Boundaries at which the bytes of each gap that is used go and come, by index."""
        found: dict[int, tuple[int, int]] = {}
        for it in self._choices:
            if round(x[it.used]):
                leaves = min(step for step, sent in it.sent.items() if round(x[sent]))
                leaves = max(leaves, it.first)
                returns = [step for step, back in it.back.items() if round(x[back])]
                stays = min(returns, default=it.last + 1) - 1
                found[it.index] = self._starts[leaves], min(self._ends[stays], it.gap.back)
        return found

    def _choice(self, index: int, gap: Gap) -> _Choice | None:
        steps = [
            step
            for step in range(bisect_right(self._ends, gap.gone), len(self._starts))
            if any(gap.gone <= op < gap.back for op in self._short[step][2])
        ]
        if not steps:
            return None
        new, first, last = self.program.variable, steps[0], steps[-1]
        it = _Choice(index, gap, first, last, new(whole=True))
        due = bisect_left(self._starts, gap.out)
        it.sent = {step: new(whole=True) for step in range(due, last)} | {last: it.used}
        if gap.alone:
            it.back = {step: new(whole=True) for step in range(first + 1, last + 1)}
        self._rise(it.sent)
        self._rise(it.back)
        for step, back in it.back.items():
            # [away]
            self.program.limit(0.0, (back, 1.0), (it.sent[step - 1], -1.0))
        return it

    def _rise(self, by_step: dict[int, int]) -> None:
        for before, after in pairwise(by_step.values()):
            self.program.limit(0.0, (before, 1.0), (after, -1.0))

    def _memory(self) -> None:
        for step, (_, _, ops) in enumerate(self._short):
            needs: dict[tuple[int, ...], int] = {}
            for op in ops:
                covering = tuple(
                    i for i, it in enumerate(self._choices) if it.gap.gone <= op < it.gap.back
                )
                needs[covering] = max(needs.get(covering, 0), int(self.swapping.over[op]))
            for covering, need in needs.items():
                # [memory] in units that divide the bytes of all: a fraction of a unit is a whole.
                unit = gcd(*(self._choices[i].gap.nbytes for i in covering))
                terms: list[tuple[int, float]] = []
                for it in (self._choices[i] for i in covering):
                    terms.append((it.sent[step], -it.gap.nbytes // unit))
                    if step in it.back:
                        terms.append((it.back[step], it.gap.nbytes // unit))
                self.program.limit(-need // unit, *terms)

    def _order(self) -> None:
        """[order]: who is first in the queue of a direction has its copy first."""
        by_read = sorted(self._choices, key=lambda it: (it.gap.back, -it.index))
        for step in range(len(self._starts)):
            self._queue((it.used, it.sent[step]) for it in self._choices if step in it.sent)
            # Who cannot be back yet, if it is away, holds up all that come later.
            self._queue((it.used, it.back.get(step)) for it in by_read if it.last >= step)
        for one, other in pairwise(self._choices):
            # [equal] of two neighbours in both queues with equal bytes, one gap within the other,
            # the longer one is used first: in the place of the other it does as well.
            within = one.gap.gone <= other.gap.gone and other.gap.back <= one.gap.back
            same = (one.gap.nbytes, one.gap.out_s, one.gap.in_s, one.gap.alone) == (
                *(other.gap.nbytes, other.gap.out_s, other.gap.in_s, other.gap.alone),
            )
            if within and same and abs(by_read.index(one) - by_read.index(other)) == 1:
                self.program.limit(0.0, (other.used, 1.0), (one.used, -1.0))

    def _queue(self, states: Iterable[tuple[int, int | None]]) -> None:
        """Let nobody's state be 1 before that of all used ones ahead; None is a state of 0."""
        ahead: int | None = None
        for used, state in states:
            here = self.program.variable()
            if ahead is not None:
                self.program.limit(0.0, (here, 1.0), (ahead, -1.0))
            own = [] if state is None else [(state, 1.0)]
            self.program.limit(0.0, *own, (here, -1.0))
            self.program.limit(1.0, (used, 1.0), (here, 1.0), *((it, -1.0) for it, _ in own))
            ahead = here

    def _time(self) -> None:
        limit = self.program.limit
        for event in range(len(self._events)):
            limit(0.0, (event, 1.0), (event + 1, -1.0))
        issues = sorted({(it.gap.out, _ISSUE) for it in self._choices})
        returns = sorted({(end, _FREE) for end in self._ends})
        frees = sorted({(start, _FREE) for start in self._starts})
        reads = sorted({(it.gap.back, _READ) for it in self._choices})
        out, back = self.swapping.links
        for lane in out:
            self._bandwidth(issues, frees, {lane: 1.0})
        for lane in back:
            self._bandwidth(returns, reads, {lane: 1.0})
        for leave, one in out.items():
            for enter, other in back.items():
                for weights in duplex_weights(one, other):
                    lanes = dict(zip((leave, enter), weights, strict=True))
                    self._bandwidth([*issues, *returns], [*frees, *reads], lanes)

    def _bandwidth(
        self, starts: Iterable[Event], ends: list[Event], lanes: dict[Lane, float]
    ) -> None:
        """[bandwidth], [duplex] between any of these events."""
        for start in starts:
            for end in ends:
                left = float(self._resumed[end[0]] - self._done[start[0]]) / self._unit
                terms = list(self._copied(start, end, lanes))
                if start < end and sum(factor for _, factor in terms if factor > 0) > left:
                    here, there = self._stall(end), self._stall(start, own=start[1] == _FREE)
                    self.program.limit(left, *terms, (here, -1.0), (there, 1.0))

    def _stall(self, event: Event, *, own: bool = True) -> int:
        """Variable of all stalls up to an event, its own included or not."""
        return bisect_right(self._events, event) if own else bisect_left(self._events, event)

    def _copied(
        self, start: Event, end: Event, lanes: dict[Lane, float]
    ) -> Iterator[tuple[int, float]]:
        """Terms of the copies that happen on some lanes between two events."""
        by = bisect_right(self._starts, end[0]) - 1
        at = bisect_left(self._ends, start[0])
        for it in self._choices:
            out_s = _weighed(it.gap.out_s, lanes) / self._unit
            sent = it.sent_by(by)
            if out_s > 0 and sent is not None and (it.gap.out, _ISSUE) >= start:
                yield sent, out_s
            in_s = _weighed(it.gap.in_s, lanes) / self._unit
            # Several values of one storage come back only when they are read.
            later = it.last >= at if it.gap.alone else (it.gap.back, _FREE) >= start
            if in_s > 0 and later and (it.gap.back, _READ) <= end:
                yield it.used, in_s
                if at in it.back:
                    yield it.back[at], -in_s

    def _objective(self) -> None:
        self.program.cost[len(self._events)] = 1.0
        total = sum(gap.nbytes for gap in self.swapping.gaps)
        for it in self._choices:
            self.program.cost[it.used] = EPSILON * _PARTS * it.gap.nbytes / total


def size(swapping: Swapping) -> int:
    """About how many whole variables the program of a case has, without making it."""
    starts = np.array([start for start, _, _ in swapping.steps])
    edges = np.array([(gap.gone, gap.back) for gap in swapping.gaps]).reshape(-1, 2)
    return 2 * int(np.diff(np.searchsorted(starts, edges), axis=1).sum())


def _weighed(seconds: Mapping[Lane, float], lanes: Mapping[Lane, float]) -> float:
    return sum(seconds[lane] * weight for lane, weight in lanes.items() if lane in seconds)
