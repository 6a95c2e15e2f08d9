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

from belady.errors import PlanMismatchError
from belady.ir.hardware import Allocator
from belady.ir.plan import Decision, Encode, Offload, Plan, Recompute
from belady.ir.trace import Tier, Trace, Value


class Interval(NamedTuple):
    """``nbytes`` held in ``tier`` for every op ``i`` with ``start <= i < end``.

    ``storage`` and ``value`` say on whose account; ``value`` is -1 for the original bytes.
    """

    tier: Tier
    storage: int
    value: int
    start: int
    end: int
    nbytes: int


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


def away(trace: Trace, index: int, decision: Offload | Recompute) -> tuple[int, int]:
    """Boundaries between which the bytes of a value are off the device under ``decision``.

    The first is where the original is gone, as far as other saved values of its storage allow;
    the second where device bytes are taken back, or the value is let go. They are off for no op
    if the first is not below the second.
    """
    value = trace.values[index]
    released = trace.storages[value.storage].released
    if isinstance(decision, Recompute):
        return max(value.first_save, released), decision.at
    stay = next((stay for stay in _stays(trace, value, decision) if stay.out < stay.end), None)
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
    scratch = [allocator.held(op.workspace_bytes) for op in trace.ops]
    for index, nbytes in _chosen_workspaces(trace, plan).items():
        scratch[index] = allocator.held(nbytes)
    for value, decision in plan.decisions.items():
        if isinstance(decision, Recompute):
            # What a replay takes on top is gone before the op at its boundary is issued.
            at = min(decision.at, len(scratch) - 1)
            scratch[at] = max(scratch[at], replay_bytes(trace, value, decision, allocator))
    return [have + more for have, more in zip(held, scratch, strict=True)]


def tier_curve(
    spans: Iterable[Interval], tier: Tier, length: int, allocator: Allocator | None = None
) -> list[int]:
    """Bytes held in ``tier`` during each of ``length`` ops."""
    change = [0] * (length + 1)
    for where, _, _, start, end, asked in spans:
        if where is tier and start < end:
            nbytes = allocator.held(asked) if allocator else asked
            change[min(start, length)] += nbytes
            change[min(end, length)] -= nbytes
    return list(accumulate(change[:length]))


def replay_bytes(trace: Trace, index: int, decision: Recompute, allocator: Allocator) -> int:
    """Bytes that a replay takes while it runs, beside those of the value: outputs and workspace."""
    ops = [trace.ops[op] for op in decision.ops]
    written = {trace.values[output].storage for op in ops for output in op.replay.writes}
    written.discard(trace.values[index].storage)
    outputs = sum(allocator.held(trace.storages[storage].nbytes) for storage in written)
    return outputs + max((allocator.held(op.workspace_bytes) for op in ops), default=0)


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


def _chosen_workspaces(trace: Trace, plan: Plan) -> dict[int, int]:
    """Scratch bytes of the ops whose algorithm the plan chooses."""
    chosen: dict[int, int] = {}
    for index, name in plan.layer_algorithms:
        known = trace.ops[index].algorithms if 0 <= index < len(trace.ops) else ()
        found = [algorithm.workspace_bytes for algorithm in known if algorithm.name == name]
        if not found:
            raise PlanMismatchError(f"op {index} has no algorithm {name!r}")
        chosen[index] = found[0]
    return chosen
