"""What ops take, from the time between boundaries that an engine has passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Plan
from belady.ir.timeline import Cause, Lane
from belady.ir.trace import Phase, Trace
from belady.measure.corrections import faster
from belady.measure.monitor import Sample
from belady.simulate import simulate
from belady.simulate.engine import kernel_seconds

# Ops that take less are corrected together with those after them.
_TOGETHER_S = 2e-4
# What is too little to correct, of all kernels; and how many times as fast ops can be.
_AGREES, _FASTEST = 0.01, 4.0
# How often the seconds of ops follow from those of others.
_LOOKS = 2


class _Stretch(NamedTuple):
    """Ops from one boundary to another, and the seconds that they took."""

    start: int
    stop: int
    seconds: float


class _Work:
    """What goes on at each op: its own kernels, and what else takes time there.

    Parameters
    ----------
    others
        Seconds of what else, see `_others`.
    """

    def __init__(self, trace: Trace, plan: Plan, others: Sequence[float]) -> None:
        self.ops = trace.ops
        self._own = kernel_seconds(trace, plan)
        self._others = others

    @property
    def seconds(self) -> float:
        """Of all ops' own kernels."""
        return sum(self._own)

    def own(self, it: _Stretch) -> float:
        """Seconds of the ops' own kernels in a stretch."""
        return sum(self._own[it.start : it.stop])

    def others(self, it: _Stretch) -> float:
        """Seconds of what else takes time in a stretch."""
        return sum(self._others[it.start : it.stop])

    def is_outside(self, it: _Stretch) -> bool:
        """Whether it is what runs between graphs, of which nothing is known from watching."""
        return all(op.phase is Phase.LOSS for op in self.ops[it.start : it.stop])


def with_pace_of(
    trace: Trace,
    plan: Plan,
    hardware: HardwareProfile,
    samples: Sequence[Sample],
    slower: float = 1.0,
) -> Trace | None:
    """The trace with device seconds as they are between the boundaries that an engine passed.

    None if they agree, or where nobody took them. Of kernels that a compiler has fused no op has
    seconds of its own, and what copies can hide under follows from when a boundary is passed.

    Parameters
    ----------
    samples
        Where the device was held back in some, these alone count.
    slower
        How many times as slow ops can become. A kernel that was watched takes no longer than the
        trace has it: what lasts longer waits for the host, or shares the device with copies.
    """
    if trace.device == "cpu":
        return None
    taken = [sample for sample in samples if sample.paced]
    held = [sample for sample in taken if sample.held]
    paced, found = [sample.paced for sample in held or taken], None
    # What is made again is of ops before: it is known better once they are.
    for _ in range(_LOOKS if paced else 0):
        others = _others(found or trace, hardware, plan, late=not held)
        found = _at_pace(trace, paced, _Work(trace, plan, others), slower)
    return found


def _others(trace: Trace, hardware: HardwareProfile, plan: Plan, *, late: bool) -> list[float]:
    """Seconds at each op of what is made again or encoded there, or in which the host is ``late``.

    As predicted.
    """
    predicted = simulate(trace, hardware, plan)
    found = [-own for own in kernel_seconds(trace, plan)]
    for span in predicted.spans:
        if span.lane is Lane.COMPUTE and span.op < len(found):
            found[span.op] += span.end_s - span.start_s
    for stall in predicted.stalls:
        if late and stall.cause is Cause.HOST and stall.op < len(found):
            found[stall.op] += stall.seconds
    return found


def _at_pace(
    trace: Trace, paced: Sequence[Mapping[tuple[int, int], float]], work: _Work, slower: float
) -> Trace | None:
    """The trace with seconds as they were between boundaries; None if they agree."""
    shared = set(paced[0]).intersection(*paced[1:])
    ops, off = list(trace.ops), 0.0
    for it in _stretches({ends: min(each[ends] for each in paced) for ends in shared}, work):
        own, left = work.own(it), it.seconds - work.others(it)
        if work.is_outside(it):
            left = max(left, 0.0)
            one = left / (it.stop - it.start)
            found = [replace(op, device_seconds=one) for op in ops[it.start : it.stop]]
        elif own > 0 and left > 0:
            share = min(max(left / own, 1 / _FASTEST), slower)
            found = [faster(op, share) for op in ops[it.start : it.stop]]
        else:
            continue
        off += abs(sum(op.device_seconds for op in found) - own)
        ops[it.start : it.stop] = found
    return replace(trace, ops=tuple(ops)) if off > _AGREES * work.seconds else None


def _stretches(between: Mapping[tuple[int, int], float], work: _Work) -> list[_Stretch]:
    """Stretches long enough to be told apart; short ones are one with what follows."""
    found: list[_Stretch] = []
    for ends, seconds in sorted(between.items()):
        it, last = _Stretch(*ends, seconds), found[-1] if found else None
        short = last is not None and not work.is_outside(last) and work.own(last) < _TOGETHER_S
        if last is not None and short and last.stop == it.start and not work.is_outside(it):
            found[-1] = _Stretch(last.start, it.stop, last.seconds + it.seconds)
        else:
            found.append(it)
    return [it for it in found if work.is_outside(it) or work.own(it) >= _TOGETHER_S]
