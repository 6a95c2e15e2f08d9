"""What ops take, from the time between boundaries that an engine has passed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import accumulate
from typing import NamedTuple

from belady.ir.hardware import HardwareProfile
from belady.ir.ops import Op
from belady.ir.plan import Plan
from belady.ir.timeline import Cause, Lane
from belady.ir.trace import Phase, Trace
from belady.measure.corrections import faster
from belady.measure.monitor import Sample
from belady.simulate import simulate
from belady.simulate.engine import kernel_seconds

# Ops that take less are corrected together with those after them.
_TOGETHER_S = 2e-4
# What is too little to correct, of all kernels.
_AGREES = 0.01
# How many times as fast ops can be that were watched, or where the host may have been late; and as
# slow, of which nobody has watched the kernel.
_FASTEST, _SLOWEST = 4.0, 4.0
# What those take at least, of a stretch; and how many times as slow as the others, by their bytes,
# one of them is thought to be.
_LEAST, _UNUSUAL = 0.05, 2.0
# How often the seconds of ops follow from those of others.
_LOOKS = 2


class _Shows(Enum):
    """What the time between boundaries shows of kernels.

    What they take; that, or less where the host was late; or the most that they take.
    """

    ALL = auto()
    LATE = auto()
    MOST = auto()


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
    made
        Whether a compiler makes the kernel of an op.
    """

    def __init__(
        self, trace: Trace, plan: Plan, others: Sequence[float], made: Callable[[Op], bool]
    ) -> None:
        self.ops = trace.ops
        self._own = kernel_seconds(trace, plan)
        self._others = others
        self._guessed = _guessed(trace, self._own, made)

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

    def shares(self, it: _Stretch, seconds: float, shows: _Shows) -> Iterator[float]:
        """What each op takes in a stretch of so many ``seconds``, of what the trace has for it.

        A kernel that was watched takes what it took then, or less: what lasts longer waits for the
        host, or shares the device with copies. What is left is of those that a compiler makes; what
        these cannot take is of all.
        """
        own, guesses = self._own[it.start : it.stop], self._guessed[it.start : it.stop]
        if shows is _Shows.MOST:
            # Of which of them it is that they take less nobody knows.
            yield from [min(1.0, max(seconds / sum(own), 1 / _FASTEST))] * len(own)
            return
        guessed = sum(guess for guess in guesses if guess is not None)
        watched = sum(s for s, guess in zip(own, guesses, strict=True) if guess is None)
        left = min(max(seconds - watched, _LEAST * seconds), _SLOWEST * guessed)
        of_all, late = seconds / (watched + left), shows is not _Shows.ALL
        if late or not guessed:
            of_all = min(of_all, 1.0)
        for one, guess in zip(own, guesses, strict=True):
            least = 1 / _FASTEST if late or guess is None else 0.0
            made = 1.0 if guess is None or not one else left / guessed * guess / one
            yield max(of_all * made, least)


def with_pace_of(
    trace: Trace,
    plan: Plan,
    hardware: HardwareProfile,
    samples: Sequence[Sample],
    made: Callable[[Op], bool] = lambda op: False,
) -> Trace | None:
    """The trace with device seconds as they are between the boundaries that an engine passed.

    None if they agree, or where nobody took them. Of kernels that a compiler has fused no op has
    seconds of its own, and what copies can hide under follows from when a boundary is passed.

    Parameters
    ----------
    samples
        Where the device was held back in some, these alone count. While the allocator flushes its
        cache the device waits for the host, too: where it did in all of them, kernels take no more
        than they show.
    made
        Whether a compiler makes the kernel of an op, together with others, so that nobody has
        watched it.
    """
    if trace.device == "cpu":
        return None
    taken = [sample for sample in samples if sample.paced]
    calm = [sample for sample in taken if not sample.retries]
    held = [sample for sample in calm if sample.held]
    shows = _Shows.ALL if held else _Shows.LATE if calm else _Shows.MOST
    paced, found = [sample.paced for sample in held or calm or taken], None
    # What is made again is of ops before: it is known better once they are.
    for _ in range(_LOOKS if paced else 0):
        others = _others(found or trace, hardware, plan, late=shows is _Shows.LATE)
        found = _at_pace(trace, paced, _Work(trace, plan, others, made), shows)
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


def _guessed(trace: Trace, own: Sequence[float], made: Callable[[Op], bool]) -> list[float | None]:
    """What is guessed of each op of which a compiler makes the kernel; None of the others.

    That is what the op took by itself, but where it reads and writes much more slowly than most:
    some ops run in many small ones where nobody compiles them.
    """
    moved = [
        (seconds, sum(trace.storages[trace.values[it].storage].nbytes for it in touched))
        for seconds, touched in zip(own, ({*op.reads, *op.writes} for op in trace.ops), strict=True)
    ]
    ours = [made(op) for op in trace.ops]
    usual = _usual([it for it, is_ours in zip(moved, ours, strict=True) if is_ours])
    return [
        min(seconds, _UNUSUAL * usual * nbytes or seconds) if is_ours else None
        for (seconds, nbytes), is_ours in zip(moved, ours, strict=True)
    ]


def _usual(moved: Sequence[tuple[float, int]]) -> float:
    """Seconds a byte of those, in their order, in the middle of all bytes; 0 without any."""
    paces = sorted((seconds / nbytes, nbytes) for seconds, nbytes in moved if nbytes)
    passed = list(accumulate(nbytes for _, nbytes in paces))
    return paces[bisect_left(passed, passed[-1] / 2)][0] if paces else 0.0


def _at_pace(
    trace: Trace, paced: Sequence[Mapping[tuple[int, int], float]], work: _Work, shows: _Shows
) -> Trace | None:
    """The trace with seconds as they were between boundaries; None if they agree."""
    shared = set(paced[0]).intersection(*paced[1:])
    ops, off = list(trace.ops), 0.0
    for it in _stretches({ends: min(each[ends] for each in paced) for ends in shared}, work):
        own, left = work.own(it), it.seconds - work.others(it)
        here = ops[it.start : it.stop]
        if work.is_outside(it) and shows is _Shows.MOST:
            continue
        if work.is_outside(it):
            one = max(left, 0.0) / len(here)
            found = [replace(op, device_seconds=one) for op in here]
        elif own > 0 and left > 0:
            found = list(map(faster, here, work.shares(it, left, shows)))
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
