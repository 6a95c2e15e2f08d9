"""Which bytes are where, op by op: a consequence of issue order alone.

The caching allocator gives bytes back when the host drops the last reference, not when a copy
ends, so every byte held follows from the order in which ops and decisions are issued. Seconds
decide only stalls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from belady.ir.hardware import Allocator
from belady.ir.plan import Decision, Encode, Offload, Plan
from belady.ir.trace import Tier, Trace, Value


@dataclass(frozen=True, slots=True)
class Interval:
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
    """Boundaries at which an Offload really acts: copy-out issued, bytes freed, bytes taken back.

    An eager engine acts at anchors, so each is rounded up to the next one; the copy-in at the
    latest at the read itself.
    """
    out = next_anchor(trace, decision.copy_out_after + 1)
    free = max(out, next_anchor(trace, decision.free_at))
    back = min(next_anchor(trace, decision.copy_in_at), decision.ready_by)
    return out, free, max(back, free)


def intervals(trace: Trace, plan: Plan) -> list[Interval]:
    """Every span of bytes held in any tier under ``plan``."""
    decisions = plan.decisions
    # A storage none of whose values moves lives as it was traced.
    kept = [storage.death for storage in trace.storages]
    for index in decisions:
        storage = trace.values[index].storage
        kept[storage] = trace.storages[storage].released
    moved_storages = {trace.values[index].storage for index in decisions}
    extra: list[Interval] = []
    for index, value in enumerate(trace.values):
        if value.storage not in moved_storages:
            continue
        until, moved = _where(trace, index, decisions.get(index))
        kept[value.storage] = max(kept[value.storage], until)
        extra += moved
    originals = [
        Interval(Tier.DEVICE, index, -1, storage.birth, kept[index], storage.nbytes)
        for index, storage in enumerate(trace.storages)
    ]
    return originals + extra


def curve(trace: Trace, plan: Plan, allocator: Allocator) -> list[int]:
    """Device bytes held during each op, allocator rounding and workspace included."""
    held = tier_curve(intervals(trace, plan), Tier.DEVICE, len(trace.ops), allocator)
    chosen = dict(plan.layer_algorithms)
    for index, op in enumerate(trace.ops):
        workspace = op.workspace_bytes
        if index in chosen:
            name = chosen[index]
            workspace = next(a.workspace_bytes for a in op.algorithms if a.name == name)
        held[index] += allocator.held(workspace)
    return held


def tier_curve(
    spans: Iterable[Interval], tier: Tier, length: int, allocator: Allocator | None = None
) -> list[int]:
    """Bytes held in ``tier`` during each of ``length`` ops."""
    change = [0] * (length + 1)
    for span in spans:
        if span.tier is tier and span.start < span.end:
            nbytes = allocator.held(span.nbytes) if allocator else span.nbytes
            change[min(span.start, length)] += nbytes
            change[min(span.end, length)] -= nbytes
    return list(accumulate(change[:length]))


def reload_end(trace: Trace, value: Value) -> int:
    """Boundary until which a copy brought back for backward is held.

    Usually until the last save is dropped; longer when backward hands the bytes on (a gradient
    that is a view of a saved tensor), which a kept storage shows as a later death.
    """
    storage = trace.storages[value.storage]
    first = value.first_read
    if first is not None and storage.released < first:
        return max(value.dropped, storage.death)
    return value.dropped


def _where(trace: Trace, index: int, decision: Decision | None) -> tuple[int, list[Interval]]:
    """Boundary until which the value holds its storage, and the bytes held elsewhere meanwhile."""
    value = trace.values[index]
    if isinstance(decision, Offload):
        return _offloaded(trace, index, decision)
    if isinstance(decision, Encode):
        return _encoded(trace, index, decision)
    return (value.dropped if value.saves else 0), []


def _offloaded(trace: Trace, index: int, decision: Offload) -> tuple[int, list[Interval]]:
    value = trace.values[index]
    nbytes = trace.storages[value.storage].nbytes
    out, free, back = offload_boundaries(trace, decision)
    end = reload_end(trace, value)
    moved = [
        Interval(decision.tier, value.storage, index, out, value.dropped, nbytes),
        Interval(Tier.DEVICE, value.storage, index, back, end, nbytes),
    ]
    return free, moved


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
