"""Which bytes are where, op by op: a consequence of issue order alone.

The caching allocator gives bytes back when the host drops the last reference, not when a copy
ends, so every byte held follows from the order in which ops and decisions are issued. Seconds
decide only stalls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from belady.ir.hardware import Allocator
from belady.ir.plan import Decision, Encode, Managed, Offload, Plan, Recompute
from belady.ir.scratch import scratch
from belady.ir.trace import Tier, Trace, Value


class Interval(NamedTuple):
    """``nbytes`` held in ``tier`` for every op ``i`` with ``start <= i < end``.

    ``storage`` and ``value`` say on whose account; ``value`` is -1 for the original bytes.
    ``managed`` bytes lie in managed memory and not in pinned memory.
    """

    tier: Tier
    storage: int
    value: int
    start: int
    end: int
    nbytes: int
    managed: bool = False


def next_anchor(trace: Trace, boundary: int) -> int:
    """First boundary at or after ``boundary`` at which the engine gets control."""
    if not trace.anchors:
        return boundary
    at = bisect_left(trace.anchors, boundary)
    return trace.anchors[at] if at < len(trace.anchors) else len(trace.ops)


def offload_boundaries(trace: Trace, decision: Offload) -> tuple[int, int, int]:
    """Boundaries from which an Offload is due: copy-out, letting go of the bytes, copy-in.

    An eager engine acts at anchors, so each is rounded up to the next one; the copy-in is due at
    ``ready_by`` at the latest, but never before the bytes are let go. What is due is done at the
    next anchor, if the value is still saved then; see `away`.
    """
    out = next_anchor(trace, decision.copy_out_after + 1)
    free = max(out, next_anchor(trace, decision.free_at))
    back = min(next_anchor(trace, decision.copy_in_at), decision.ready_by)
    return out, free, max(back, free)


def away(
    trace: Trace, index: int, decision: Offload | Managed | Recompute | Encode
) -> tuple[int, int]:
    """Boundaries between which the bytes of a value are off the device under ``decision``.

    The first is where the original is gone, as far as other saved values of its storage allow;
    the second where device bytes are taken back, or the value is let go. They are off for no op
    if the first is not below the second.
    """
    value = trace.values[index]
    released = trace.storages[value.storage].released
    if isinstance(decision, Recompute):
        return max(value.first_save, released), decision.at
    if isinstance(decision, Encode):
        return max(decision.encode_at, released), decision.decode_at
    stays = _stays(trace, value, decision.moves if isinstance(decision, Managed) else decision)
    stay = next((stay for stay in stays if stay.out < stay.end), None)
    if stay is None:
        return value.dropped, value.dropped
    return max(stay.free, released), stay.end if stay.back is None else stay.back


def intervals(trace: Trace, plan: Plan) -> list[Interval]:
    """Every span of bytes held in any tier under ``plan``."""
    decisions = plan.decisions
    # A storage none of whose values moves lives as it was traced.
    kept = [storage.death for storage in trace.storages]
    moved_storages = {trace.values[index].storage for index in decisions}
    for index in moved_storages:
        kept[index] = trace.storages[index].released
    extra: list[Interval] = []
    for index, value in enumerate(trace.values):
        if value.storage not in moved_storages or not value.saves:
            continue
        until, moved = _where(trace, index, decisions.get(index))
        kept[value.storage] = max(kept[value.storage], until)
        extra += moved
    originals = [
        Interval(Tier.DEVICE, index, -1, storage.birth, kept[index], storage.nbytes)
        for index, storage in enumerate(trace.storages)
    ]
    return originals + extra


def curve(
    trace: Trace, plan: Plan, allocator: Allocator, spans: Iterable[Interval] | None = None
) -> list[int]:
    """Device bytes held during each op, allocator rounding and workspace included.

    What managed blocks need at most is held throughout, see `managed_room`.

    Parameters
    ----------
    spans
        What `intervals` gives for ``trace`` and ``plan``, if it is known already.

    Raises
    ------
    PlanMismatchError
        If the plan chooses an algorithm that its op does not have.
    """
    spans = intervals(trace, plan) if spans is None else spans
    held = tier_curve(spans, Tier.DEVICE, len(trace.ops), allocator)
    needed = scratch(trace, plan, allocator)
    room = managed_room(trace, plan, allocator)
    return [have + more + room for have, more in zip(held, needed, strict=True)]


def managed_room(trace: Trace, plan: Plan, allocator: Allocator) -> int:
    """Most bytes that managed blocks have on the device at once.

    They are set aside for the whole iteration: torch's allocator gives nothing that it has
    reserved back to the device in the middle of one, so what is for blocks is never its own.

    Of the blocks that go out and are waited for at one boundary there is one at a time.
    """
    length = len(trace.ops) + 1
    early, taken, left, back, ended, passing = ([0] * (length + 1) for _ in range(6))
    for index, decision in plan.decisions.items():
        if not isinstance(decision, Managed):
            continue
        value = trace.values[index]
        nbytes = allocator.held(trace.storages[value.storage].nbytes)
        beyond = reload_end(trace, value) - value.dropped
        _, _, due = offload_boundaries(trace, decision.moves)
        for stay in _stays(trace, value, decision.moves):
            if stay.out >= stay.end:
                continue
            if decision.gone_by == decision.prefetch_out_at:
                passing[stay.out] = max(passing[stay.out], nbytes)
            else:
                taken[stay.out] += nbytes
                left[stay.free] += nbytes
            if stay.back is not None:
                # What was due before the engine got control comes first.
                (early if due < stay.back else back)[stay.back] += nbytes
                ended[stay.end + beyond] += nbytes
    most = held = 0
    # In the order in which it happens at a boundary.
    for at in range(length):
        held += early[at] + taken[at] - ended[at]
        most = max(most, held + passing[at])
        held += back[at] - left[at]
        most = max(most, held)
    return most


def tier_curve(
    spans: Iterable[Interval], tier: Tier, length: int, allocator: Allocator | None = None
) -> list[int]:
    """Bytes held in ``tier`` during each of ``length`` ops."""
    change = [0] * (length + 1)
    for where, _, _, start, end, asked, _ in spans:
        if where is tier and start < end:
            nbytes = allocator.held(asked) if allocator else asked
            change[min(start, length)] += nbytes
            change[min(end, length)] -= nbytes
    return list(accumulate(change[:length]))


def reload_end(trace: Trace, value: Value) -> int:
    """Boundary until which bytes that backward takes back are held.

    Usually until the last save is dropped. Longer when ops go on to use them (compiled backward
    passes let go of everything at once), or backward hands them on (a gradient that is a view of
    a saved tensor), which a kept storage shows as a death after every drop.
    """
    storage = trace.storages[value.storage]
    first = value.first_read
    if first is None or storage.released >= first:
        return value.dropped
    if storage.death > trace.last_drops[value.storage]:
        return storage.death
    return max([value.dropped, *(use.op + 1 for use in value.uses)])


class _Stay(NamedTuple):
    """What an Offload makes of one uninterrupted time for which a value is saved.

    Boundaries: last drop; copy-out issued and original let go, ``end`` where it is not; bytes
    taken back, None where they are not.
    """

    end: int
    out: int
    free: int
    back: int | None


def _stays(trace: Trace, value: Value, decision: Offload) -> Iterator[_Stay]:
    """What the engine does, time by time: when the last save is dropped, it forgets the value."""
    due_out, due_free, due_back = offload_boundaries(trace, decision)
    due_back = next_anchor(trace, due_back)
    for start, end, reads in times_saved(value):
        if not start <= due_out < end:
            # Never sent, so the original stays.
            yield _Stay(end, end, end, None)
            continue
        free = min(due_free, end)
        # A read finds the original where it is still there, and else brings back what is not here.
        backs = [read for read in reads if read >= free]
        if due_back < end:
            backs.append(due_back)
        yield _Stay(end, due_out, free, min(backs, default=None))


def times_saved(value: Value) -> Iterator[tuple[int, int, list[int]]]:
    """First save, last drop and reads of each uninterrupted time for which a value is saved."""
    saves = value.saves
    if len(saves) > 1:
        saves = tuple(sorted(saves, key=lambda save: save.packed))
    start, end, reads = saves[0].packed, saves[0].dropped, [*saves[0].reads]
    for save in saves[1:]:
        # At one boundary a drop may come before a save; then the engine has forgotten the value.
        if save.packed >= end:
            yield start, end, reads
            start, end, reads = save.packed, save.dropped, []
        end = max(end, save.dropped)
        reads += save.reads
    yield start, end, reads


def _where(trace: Trace, index: int, decision: Decision | None) -> tuple[int, list[Interval]]:
    """Boundary until which the value holds its storage, and the bytes held elsewhere meanwhile."""
    if isinstance(decision, Offload):
        return _offloaded(trace, index, decision)
    if isinstance(decision, Managed):
        return _managed(trace, index, decision)
    if isinstance(decision, Encode):
        return _encoded(trace, index, decision)
    if isinstance(decision, Recompute):
        return _recomputed(trace, index, decision)
    return reload_end(trace, trace.values[index]), []


def _offloaded(trace: Trace, index: int, decision: Offload) -> tuple[int, list[Interval]]:
    value = trace.values[index]
    nbytes = trace.storages[value.storage].nbytes
    beyond = reload_end(trace, value) - value.dropped
    moved = []
    until = 0
    for stay in _stays(trace, value, decision):
        until = max(until, stay.free)
        moved.append(Interval(decision.tier, value.storage, index, stay.out, stay.end, nbytes))
        if stay.back is not None:
            end = stay.end + beyond
            moved.append(Interval(Tier.DEVICE, value.storage, index, stay.back, end, nbytes))
    return until, moved


def _managed(trace: Trace, index: int, decision: Managed) -> tuple[int, list[Interval]]:
    value = trace.values[index]
    nbytes = trace.storages[value.storage].nbytes
    stays = list(_stays(trace, value, decision.moves))
    parked = [
        Interval(Tier.HOST, value.storage, index, stay.out, stay.end, nbytes, managed=True)
        for stay in stays
        if stay.out < stay.end
    ]
    return max(stay.out for stay in stays), parked


def _encoded(trace: Trace, index: int, decision: Encode) -> tuple[int, list[Interval]]:
    value = trace.values[index]
    nbytes = trace.storages[value.storage].nbytes
    end = reload_end(trace, value)
    held = [
        Interval(
            Tier.DEVICE, value.storage, index, decision.encode_at, value.dropped, decision.nbytes
        ),
        Interval(Tier.DEVICE, value.storage, index, decision.decode_at, end, nbytes),
    ]
    return decision.encode_at, held


def _recomputed(trace: Trace, index: int, decision: Recompute) -> tuple[int, list[Interval]]:
    value = trace.values[index]
    nbytes = trace.storages[value.storage].nbytes
    end = reload_end(trace, value)
    again = Interval(Tier.DEVICE, value.storage, index, decision.at, end, nbytes)
    return value.first_save, [again]
