"""How many bytes are held in a tier, op by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from belady.ir.hardware import Allocator
from belady.ir.plan import Managed, Plan
from belady.ir.residency import (
    Interval,
    intervals,
    moved_spans,
    offload_boundaries,
    reload_end,
    stays,
)
from belady.ir.scratch import scratch
from belady.ir.trace import Tier, Trace


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
    length = len(trace.ops)
    if spans is None:
        held = _held(trace, plan, allocator)
    else:
        held = tier_curve(spans, Tier.DEVICE, length, allocator)
    needed = scratch(trace, plan, allocator)
    room = managed_room(trace, plan, allocator)
    return [have + more + room for have, more in zip(held, needed, strict=True)]


def _held(trace: Trace, plan: Plan, allocator: Allocator) -> list[int]:
    """Device bytes of all spans during each op: as traced, and what the plan changes of that."""
    length, key = len(trace.ops), (_held, allocator.round_bytes)
    if key not in trace.worked_out:
        kept = intervals(trace, Plan(trace.fingerprint, "", plan.budget, ()))
        trace.worked_out[key] = _changes(kept, Tier.DEVICE, length, allocator)
    ends, moved = moved_spans(trace, plan)
    changes = _changes(moved, Tier.DEVICE, length, allocator, trace.worked_out[key])
    for index, end in ends.items():
        storage = trace.storages[index]
        nbytes = allocator.held(storage.nbytes)
        changes[min(end, length)] -= nbytes
        changes[min(storage.death, length)] += nbytes
    return list(accumulate(changes[:length]))


def managed_room(trace: Trace, plan: Plan, allocator: Allocator) -> int:
    """Most bytes that managed blocks have on the device at once.

    They are set aside for the whole iteration: torch's allocator gives nothing that it has
    reserved back to the device in the middle of one, so what is for blocks is never its own.

    Of the blocks that go out and are waited for at one boundary there is one at a time.
    """
    if not any(isinstance(decision, Managed) for decision in plan.decisions.values()):
        return 0
    length = len(trace.ops) + 1
    early, taken, left, back, ended, passing = ([0] * (length + 1) for _ in range(6))
    for index, decision in plan.decisions.items():
        if not isinstance(decision, Managed):
            continue
        value = trace.values[index]
        nbytes = allocator.held(trace.storages[value.storage].nbytes)
        beyond = reload_end(trace, value) - value.dropped
        _, _, due = offload_boundaries(trace, decision.moves)
        for stay in stays(trace, value, decision.moves):
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


def host_room(trace: Trace, plan: Plan) -> tuple[int, Counter[int]]:
    """Bytes to pin, and the most values of each size that are in managed blocks at once."""
    length = len(trace.ops)
    spans = intervals(trace, plan)
    sizes = {span.nbytes for span in spans if span.managed}
    blocks: Counter[int] = Counter()
    for nbytes in sizes:
        mine = [span for span in spans if span.managed and span.nbytes == nbytes]
        blocks[nbytes] = max(tier_curve(mine, Tier.HOST, length), default=0) // nbytes
    pinned = tier_curve([span for span in spans if not span.managed], Tier.HOST, length)
    return max(pinned, default=0), blocks


def tier_curve(
    spans: Iterable[Interval], tier: Tier, length: int, allocator: Allocator | None = None
) -> list[int]:
    """Bytes held in ``tier`` during each of ``length`` ops."""
    return list(accumulate(_changes(spans, tier, length, allocator)[:length]))


def _changes(
    spans: Iterable[Interval],
    tier: Tier,
    length: int,
    allocator: Allocator | None,
    others: Sequence[int] = (),
) -> list[int]:
    """Bytes more or less at each boundary, with those of ``others``."""
    change = [*others] or [0] * (length + 1)
    for where, _, _, start, end, asked, _ in spans:
        if where is tier and start < end:
            nbytes = allocator.held(asked) if allocator else asked
            change[min(start, length)] += nbytes
            change[min(end, length)] -= nbytes
    return change
