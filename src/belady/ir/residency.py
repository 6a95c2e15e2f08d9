"""Which bytes are where, op by op: a consequence of issue order alone.

The caching allocator gives bytes back when the host drops the last reference, not when a copy
ends, so every byte held follows from the order in which ops and decisions are issued. Seconds
decide only stalls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from belady.ir.plan import Decision, Encode, Managed, Offload, Plan, Recompute
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
    found = stays(trace, value, decision.moves if isinstance(decision, Managed) else decision)
    stay = next((stay for stay in found if stay.out < stay.end), None)
    if stay is None:
        return value.dropped, value.dropped
    return max(stay.free, released), stay.end if stay.back is None else stay.back


def intervals(trace: Trace, plan: Plan) -> list[Interval]:
    """Every span of bytes held in any tier under ``plan``."""
    kept, extra = moved_spans(trace, plan)
    originals = [
        Interval(Tier.DEVICE, i, -1, storage.birth, kept.get(i, storage.death), storage.nbytes)
        for i, storage in enumerate(trace.storages)
    ]
    return originals + extra


def moved_spans(trace: Trace, plan: Plan) -> tuple[dict[int, int], list[Interval]]:
    """Ends of the storages of which a value moves, and the spans of what is moved.

    All others live as they were traced.
    """
    decisions = plan.decisions
    storages = {trace.values[index].storage for index in decisions}
    kept = {index: trace.storages[index].released for index in storages}
    extra: list[Interval] = []
    for index in sorted(value for storage in storages for value in trace.contents[storage]):
        value = trace.values[index]
        if value.saves:
            until, moved = _where(trace, index, decisions.get(index))
            kept[value.storage] = max(kept[value.storage], until)
            extra += moved
    return kept, extra


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


def stays(trace: Trace, value: Value, decision: Offload) -> Iterator[_Stay]:
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


def saved_from(value: Value, until: int) -> int:
    """First save of the uninterrupted time for which a value is saved until ``until``."""
    if len(value.saves) == 1:
        return value.first_save
    return next(start for start, end, _ in times_saved(value) if until <= end)


def _where(trace: Trace, index: int, decision: Decision | None) -> tuple[int, list[Interval]]:
    """Boundary until which the value holds its storage, and the bytes held elsewhere meanwhile."""
    # Of a replay it only matters when it runs, and to compare its ops takes longer than to ask.
    name = _where, index, decision.at if isinstance(decision, Recompute) else decision
    known: tuple[int, list[Interval]] | None = trace.worked_out.get(name)
    if known is None:
        known = trace.worked_out[name] = _found(trace, index, decision)
    return known


def _found(trace: Trace, index: int, decision: Decision | None) -> tuple[int, list[Interval]]:
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
    for stay in stays(trace, value, decision):
        until = max(until, stay.free)
        moved.append(Interval(decision.tier, value.storage, index, stay.out, stay.end, nbytes))
        if stay.back is not None:
            end = stay.end + beyond
            moved.append(Interval(Tier.DEVICE, value.storage, index, stay.back, end, nbytes))
    return until, moved


def _managed(trace: Trace, index: int, decision: Managed) -> tuple[int, list[Interval]]:
    value = trace.values[index]
    nbytes = trace.storages[value.storage].nbytes
    times = list(stays(trace, value, decision.moves))
    parked = [
        Interval(Tier.HOST, value.storage, index, stay.out, stay.end, nbytes, managed=True)
        for stay in times
        if stay.out < stay.end
    ]
    return max(stay.out for stay in times), parked


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
