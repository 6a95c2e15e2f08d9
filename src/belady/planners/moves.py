"""Which values can move, and a move as a legal `Offload`: rules choose, these helpers place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

from belady.errors import TierError
from belady.ir.encoding import encoding_of
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Encode, Offload
from belady.ir.residency import next_anchor, saved_from
from belady.ir.trace import Tier, Trace, Value
from belady.simulate.routes import routes

T = TypeVar("T")

# One page: a smaller copy costs more in latency than its bytes are worth.
MIN_BYTES = 4096


@dataclass(frozen=True)
class Case:
    """What a planner is asked.

    Attributes
    ----------
    exact
        Whether decisions that can change a bit of the result are forbidden.
    """

    trace: Trace
    hardware: HardwareProfile
    budget: Budget
    exact: bool = False

    @cached_property
    def movable(self) -> frozenset[int]:
        """What `movable` finds, which a search asks for with every plan it tries."""
        return frozenset(movable(self.trace))


class Schedule(NamedTuple):
    """When a policy wants a value moved; fields as in `belady.ir.plan.Offload`.

    ``ready_by`` is where the bytes are needed before backward reads them, if anywhere.
    """

    copy_out_after: int
    free_at: int
    copy_in_at: int
    ready_by: int | None = None


def read_by(value: Value) -> int:
    """Boundary at which the bytes must be back: the first read, or the drop if none comes."""
    first = value.first_read
    return value.dropped if first is None else first


def movable(trace: Trace) -> tuple[int, ...]:
    """Ids of the saved values whose bytes device memory really gains from moving, ascending.

    They are transient, of at least `MIN_BYTES` bytes, and somewhere between save and first read
    nothing but autograd holds them (an input that the caller keeps frees nothing). The saved
    values of one storage move together or not at all; where backward reads several of them they
    stay, since each would come back as a copy of the whole storage.
    """
    groups: dict[int, list[int]] = {}
    for index in trace.saved:
        groups.setdefault(trace.values[index].storage, []).append(index)
    return tuple(sorted(i for group in groups.values() if _gains(trace, group) for i in group))


def encodings(case: Case, values: Iterable[int]) -> dict[int, Encode]:
    """Those of ``values`` that fit into fewer bytes, held so from their save to their first read.

    Rounded as the allocator does, small ones may save nothing.
    """
    found: dict[int, Encode] = {}
    for index in values:
        value, held = case.trace.values[index], case.hardware.allocator.held
        encoding = encoding_of(case.trace, index)
        saved = held(case.trace.storages[value.storage].nbytes)
        if encoding is not None and value.first_read is not None and held(encoding.nbytes) < saved:
            found[index] = Encode(*encoding, value.first_save, value.first_read)
    return found


def select(trace: Trace, wanted: Callable[[int], bool]) -> tuple[int, ...]:
    """Movable values that are wanted, or that share their storage with one that is."""
    values = movable(trace)
    storages = {trace.values[index].storage for index in values if wanted(index)}
    return tuple(index for index in values if trace.values[index].storage in storages)


def place(trace: Trace, index: int, tier: Tier, schedule: Schedule) -> Offload | None:
    """Turn a wish into a legal Offload at boundaries where the engine gets control.

    Returns
    -------
    Offload or None
        None when the bytes would not leave the device for a single op.
    """
    value = trace.values[index]
    released, read = trace.storages[value.storage].released, read_by(value)
    ready = read if schedule.ready_by is None else min(read, schedule.ready_by)
    # What is sent before autograd lets go for a time is forgotten then.
    out = next_anchor(trace, max(schedule.copy_out_after + 1, saved_from(value, read)))
    free = max(out, next_anchor(trace, schedule.free_at))
    gone = max(free, released)
    back = min(next_anchor(trace, schedule.copy_in_at), ready)
    # Brought back before the original bytes are gone, the value would be held twice.
    if gone >= back:
        return None
    return Offload(tier, out - 1, free, back, ready)


def tier_for(case: Case, values: Iterable[int]) -> dict[int, Tier]:
    """Tier of each value: HOST while it has room, then DISK; a CPU has DISK alone.

    When a tier is full, the value that is needed last goes on to the next (Belady's rule).
    Values for which no tier has room are absent, with all that share their storage.
    """
    trace = case.trace
    asked = sorted(values, key=lambda index: (trace.values[index].first_save, index))
    left, found = asked, dict[int, Tier]()
    for tier in (Tier.DISK,) if trace.device == "cpu" else (Tier.HOST, Tier.DISK):
        turned_away = _overflow(trace, left, _room(case, tier))
        found |= {index: tier for index in left if index not in turned_away}
        left = [index for index in left if index in turned_away]
    return _whole(trace, asked, found)


def offloads(
    trace: Trace, tiers: Mapping[int, Tier], schedules: Mapping[int, Schedule]
) -> dict[int, Offload]:
    """Offload the values of ``tiers`` as scheduled, but for those that would not really leave."""
    placed: dict[int, Offload] = {}
    for index, tier in tiers.items():
        move = place(trace, index, tier, schedules[index])
        if move is not None:
            placed[index] = move
    return _whole(trace, tiers, placed)


def _whole(trace: Trace, asked: Iterable[int], granted: Mapping[int, T]) -> dict[int, T]:
    """What was granted, by ascending value, without the storages of which a part was not."""
    denied = {trace.values[index].storage for index in asked if index not in granted}
    return {
        index: granted[index]
        for index in sorted(granted)
        if trace.values[index].storage not in denied
    }


def _gains(trace: Trace, group: list[int]) -> bool:
    values = [trace.values[index] for index in group]
    storage = trace.storages[values[0].storage]
    if storage.nbytes < MIN_BYTES or sum(v.first_read is not None for v in values) > 1:
        return False
    return all(
        max(storage.released, next_anchor(trace, value.first_save + 1)) < read_by(value)
        for value in values
    )


def _room(case: Case, tier: Tier) -> int:
    """Bytes that the plan may hold in ``tier``; 0 where the machine cannot reach it."""
    try:
        routes(case.hardware, tier)
    except TierError:
        return 0
    capacity = case.hardware.capacity(tier)
    limit = case.budget.host_bytes if tier is Tier.HOST else case.budget.disk_bytes
    return capacity if limit is None else min(limit, capacity)


def _overflow(trace: Trace, values: Sequence[int], room: int) -> set[int]:
    """Values to turn away so that the rest, in order of save, never hold more than ``room``."""
    turned_away: set[int] = set()
    inside: dict[int, int] = {}  # bytes by value
    by_drop: list[tuple[int, int]] = []
    by_read: list[tuple[int, int]] = []
    held = 0
    for index in values:
        value = trace.values[index]
        while by_drop and by_drop[0][0] <= value.first_save:
            held -= inside.pop(heappop(by_drop)[1], 0)
        inside[index] = trace.storages[value.storage].nbytes
        held += inside[index]
        heappush(by_drop, (value.dropped, index))
        heappush(by_read, (-read_by(value), index))
        while held > room:
            last = heappop(by_read)[1]
            if last in inside:
                held -= inside.pop(last)
                turned_away.add(last)
    return turned_away
