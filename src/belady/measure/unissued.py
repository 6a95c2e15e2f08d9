"""An iteration that no host issues, since it was captured and is launched."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Assignment, Offload, Plan
from belady.ir.timeline import Lane, Measured, Span
from belady.ir.trace import Phase, Storage, StorageKind, Trace
from belady.measure.corrections import unhindered_seconds
from belady.measure.trial import Trial
from belady.simulate import simulate
from belady.simulate.engine import iteration_seconds, kernel_seconds, last_of_forward
from belady.simulate.reassigned import reassigned
from belady.simulate.stretch import SMALL

# Asks for a plan, and the machine with the margin that suits it.
Ask = Callable[[HardwareProfile], tuple[Plan, HardwareProfile]]
# Part of a budget that is lost where blocks are packed: what is not foretold of them, and pages.
LOST = 0.04
# What is worth another plan.
_LOSES = 1.03
# Part of an iteration that copies which go out in backward have to gain.
_WORTH = 0.01


def unissued(trace: Trace) -> Trace:
    """The trace with no host in it, of launches alone.

    What forward gives is copied when its launch has ended, and of what backward is given nobody
    else has the bytes: a launch lets go of both once it has no more use for them. What a loss needs
    in between is not theirs.
    """
    ended = last_of_forward(trace) + 1
    ops = [replace(op, host_seconds=0.0) for op in trace.ops]
    for at, op in enumerate(ops):
        if op.phase is Phase.LOSS:
            ops[at] = replace(op, workspace_bytes=0)
    storages, saved = [*trace.storages], {trace.values[value].storage for value in trace.saved}
    for number, used in _last_uses(trace).items():
        it = storages[number]
        given = it.kind is StorageKind.INPUT and it.birth >= ended
        made = it.kind is StorageKind.ACTIVATION and it.birth < ended and number not in saved
        if ended and ((given and used >= ended) or (made and used < ended)):
            # What is due at the end of forward is done while results are there.
            over = min(it.death, used + 1 if given else ended + 1)
            storages[number] = replace(it, released=min(it.released, over), death=over)
    return replace(trace, ops=tuple(ops), storages=tuple(storages))


def freed(
    trace: Trace, hardware: HardwareProfile, plan: Plan, run: Trial, measured: Measured
) -> tuple[float, float]:
    """Seconds foretold of an iteration under the plan if no host were ever late, and with one.

    What lies between is what launches of this plan could gain; another one may be faster anyway.
    What of iterations that have run is not foretold counts as the host's: a launch will tell.

    Parameters
    ----------
    run
        A plan that has run, and the machine as it showed itself.
    """
    alone = replace(trace, ops=tuple(replace(op, host_seconds=0.0) for op in trace.ops))
    without = iteration_seconds(alone, _unissuing(hardware), plan)
    slower = measured.seconds / iteration_seconds(trace, run.hardware, run.plan)
    return without, max(1.0, slower) * iteration_seconds(trace, hardware, plan)


def loses(trace: Trace, plan: Plan) -> bool:
    """Whether an iteration is foretold to take clearly longer than its kernels, or its host."""
    return plan.predicted_seconds > _LOSES * unhindered_seconds(trace)


def _unissuing(hardware: HardwareProfile) -> HardwareProfile:
    """The machine on which copies and replays are issued for nothing."""
    links = tuple(replace(link, issue_s=0.0) for link in hardware.links)
    return replace(hardware, links=links, hook_s=0.0)


def _last_uses(trace: Trace) -> dict[int, int]:
    """The last op that reads or writes each storage, of those that some op does."""
    found = dict[int, int]()
    for at, op in enumerate(trace.ops):
        found |= {trace.values[value].storage: at for value in (*op.reads, *op.writes)}
    return found


def launching(
    hardware: HardwareProfile, probed: HardwareProfile, beside_bytes: int, packed_bytes: int = 0
) -> HardwareProfile:
    """The machine on which copies and replays are issued for nothing, and forward waits for them.

    Parameters
    ----------
    probed
        As it was before any correction. What the allocator has lost between blocks of iterations
        that were issued is not lost where each has its place: no more than its margin is left.
    beside_bytes
        What others need that may not lie where launches write: it is left of every budget.
    packed_bytes
        The budget into which blocks are packed, of which next to nothing is lost then; 0 where they
        are not.
    """
    allocator = hardware.allocator
    fraction = min(allocator.margin_fraction, probed.allocator.margin_fraction)
    nbytes = allocator.margin_bytes + beside_bytes
    if packed_bytes:
        fraction, nbytes = 0.0, nbytes + int(LOST * packed_bytes)
    allocator = replace(allocator, margin_fraction=fraction, margin_bytes=nbytes)
    return replace(_unissuing(hardware), allocator=allocator, joins=True)


def small_bytes(trace: Trace, packed_bytes: int) -> int:
    """What small gradients take beside blocks that are packed into so many bytes.

    They have pages of their own, and all of them are there when activations are not any more, whose
    bytes they cannot have. What is lost between blocks, and they, have `LOST`: half of it each.
    """
    nbytes = sum(it.nbytes for it in trace.storages if _is_small_gradient(it))
    return max(0, nbytes - int(LOST / 2 * packed_bytes)) if packed_bytes else 0


def _is_small_gradient(it: Storage) -> bool:
    return it.kind is StorageKind.GRADIENT and it.nbytes <= SMALL


def for_launches(
    trace: Trace, hardware: HardwareProfile, boundaries: Sequence[int], ask: Ask, again: Ask
) -> tuple[Plan, HardwareProfile]:
    """A plan for a machine that joins copies, and the machine that it was made for.

    One that was made without the wait sends more, and has what outlasts forward go out in backward.
    Where it is hardly faster, less that is sent is less that can be late.

    Parameters
    ----------
    boundaries
        As `in_time` has them.
    ask
        Gives a plan for a machine, and the machine with the margin that suits the plan.
    again
        The same for a machine that has such a margin already.
    """
    plan, suits = ask(replace(hardware, joins=True))
    enough = (1 - _WORTH) * plan.predicted_seconds
    if enough < sum(kernel_seconds(trace, plan)):
        return plan, suits
    sending, machine = again(replace(suits, joins=False))
    machine = replace(machine, joins=True)
    sending = in_time(trace, machine, sending, boundaries)
    return (sending, machine) if sending.predicted_seconds < enough else (plan, suits)


def in_time(trace: Trace, hardware: HardwareProfile, plan: Plan, boundaries: Sequence[int]) -> Plan:
    """The plan with copies out that would outlast forward issued in backward, if that is faster.

    A launch ends when all that was issued in it has ended: the loss would wait for copies that
    nothing waits for otherwise. What is half copied by then stays, and is waited for. All others
    are issued where they are predicted to begin, or before: one at a boundary, since several would
    go out in the order of the plan, which is that in which they come back. The first of them can
    stay, too, where backward waits for them as soon as it begins.

    Parameters
    ----------
    boundaries
        Where they should be issued.
    """
    plan = best = replace(plan, predicted_seconds=iteration_seconds(trace, hardware, plan))
    if last_of_forward(trace) < 0:
        return best
    begins = next(at for at, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
    late, first = _late(trace, hardware, plan, begins), 0
    while first < len(late):
        places = _places(late[first:], begins, boundaries, len(trace.ops))
        other = reassigned(trace, hardware, plan, [_out_at(it, places) for it in plan.assignments])
        if other is not None:
            best = min(best, other, key=attrgetter("predicted_seconds"))
        first = max(1, 2 * first)
    return best


def _late(
    trace: Trace, hardware: HardwareProfile, plan: Plan, begins: int
) -> list[tuple[int, int]]:
    """Values whose copies are not half done when forward ends, and the op at which each begins.

    In order; without those that compute waits for before backward.
    """
    spans = simulate(trace, replace(hardware, joins=False), plan).spans
    kernels = [it for it in spans if it.lane is Lane.COMPUTE and 0 <= it.op < len(trace.ops)]
    forward = (it for it in kernels if trace.ops[it.op].phase is Phase.FORWARD)
    ended = max((it.end_s for it in forward), default=0.0)
    later = [it for it in kernels if it.op >= begins]
    outs = [it for it in spans if it.lane is Lane.COPY_OUT and it.start_s + it.end_s > 2 * ended]
    return [
        (it.value, later[max(0, bisect_right(later, it.start_s, key=_start) - 1)].op)
        for it in sorted(outs, key=_start)
        if later
        and isinstance(move := plan.decisions[it.value], Offload)
        and move.free_at >= begins
    ]


def _places(
    late: Sequence[tuple[int, int]], begins: int, boundaries: Sequence[int], end: int
) -> dict[int, int]:
    """A boundary for each copy, all of them apart."""
    places = _apart(late, [begins, *(it for it in boundaries if it > begins)])
    if len({*places.values()}) == len(places):
        return places
    # Two kernels of one are better than a lane that has its copies in another order.
    return _apart(late, range(begins, end))


def _apart(late: Sequence[tuple[int, int]], allowed: Sequence[int]) -> dict[int, int]:
    """A place for each, the last one first: where it is due, or before; the first one for many."""
    found, before = dict[int, int](), len(allowed)
    for value, due in reversed(late):
        before = max(0, bisect_right(allowed, due, 0, before) - 1)
        found[value] = allowed[before]
    return found


def _out_at(it: Assignment, places: Mapping[int, int]) -> Assignment:
    move = it.decision
    if it.value not in places or not isinstance(move, Offload):
        return it
    after = min(places[it.value], move.free_at) - 1
    return replace(it, decision=replace(move, copy_out_after=after))


def _start(span: Span) -> float:
    return span.start_s
