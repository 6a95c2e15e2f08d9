"""Which values may move, where to, and how a wish becomes legal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.ir.hardware import Capacity
from belady.ir.legality import check
from belady.ir.plan import Assignment, Budget, Offload, Plan
from belady.ir.trace import Tier, Trace, Value
from belady.planners import plan, smallest_budget
from belady.planners.moves import (
    MIN_BYTES,
    Case,
    Schedule,
    movable,
    offloads,
    place,
    select,
    tier_for,
)
from tests.unit.planners.nets import MIB, VGG, cpu, gpu, moves, net, written_by

PLENTY = Budget(1 << 40)
CHAIN = "conv conv conv conv fc"  # values written by 0..3 are saved by the next


def with_bytes(trace: Trace, value: int, nbytes: int) -> Trace:
    storages = list(trace.storages)
    at = trace.values[value].storage
    storages[at] = replace(storages[at], nbytes=nbytes)
    return replace(trace, storages=tuple(storages))


def released_at(trace: Trace, value: int, boundary: int) -> Trace:
    storages = list(trace.storages)
    at = trace.values[value].storage
    storages[at] = replace(storages[at], released=boundary)
    return replace(trace, storages=tuple(storages))


def with_older_version(trace: Trace, value: int, reads: tuple[int, ...]) -> Trace:
    """Another saved value in the storage of ``value``, overwritten by it."""
    it = trace.values[value]
    save = replace(it.saves[0], reads=reads)
    values = list(trace.values)
    values[value] = replace(it, version=1)
    return replace(trace, values=(*values, Value(it.storage, 0, it.producer, (), (save,))))


def test_movable_are_saved_activations() -> None:
    trace = net(CHAIN)
    # Op 3's output is read by fc at boundary 4 and again at 5, where nothing lies between.
    assert movable(trace) == tuple(written_by(trace, op) for op in range(3))


def test_what_is_let_go_for_a_time_is_sent_when_it_is_saved_again() -> None:
    trace = net(CHAIN)
    value = written_by(trace, 0)
    it = trace.values[value]
    (save,) = it.saves
    # Somebody looks at it, and has autograd let go, an op before it is saved for backward.
    seen = replace(save, packed=save.packed, reads=(), dropped=save.packed + 1)
    again = replace(save, packed=save.packed + 2)
    values = list(trace.values)
    values[value] = replace(it, saves=(seen, again))
    trace = released_at(replace(trace, values=tuple(values)), value, again.packed + 1)
    found = place(trace, value, Tier.HOST, Schedule(0, 0, 10**6))
    assert found is not None
    assert found.copy_out_after + 1 >= again.packed
    made = Plan(trace.fingerprint, "test", PLENTY, (Assignment(value, found),))
    assert check(trace, gpu(), made, PLENTY).problems == ()


def test_small_values_do_not_move() -> None:
    trace = net(CHAIN)
    value = written_by(trace, 1)
    assert value in movable(with_bytes(trace, value, MIN_BYTES))
    assert value not in movable(with_bytes(trace, value, MIN_BYTES - 1))


def test_what_someone_else_holds_until_its_read_does_not_move() -> None:
    trace = net(CHAIN)
    value = written_by(trace, 1)
    read = trace.values[value].first_read
    assert read is not None
    assert value in movable(released_at(trace, value, read - 1))
    assert value not in movable(released_at(trace, value, read))


def test_values_of_one_storage_move_together() -> None:
    trace = net(CHAIN)
    value = written_by(trace, 1)
    both = with_older_version(trace, value, reads=())
    older = len(both.values) - 1
    assert select(both, lambda index: index == value)[-2:] == (value, older)
    assert set(plan("floor", both, gpu(), PLENTY).decisions) >= {value, older}
    # Without room for both, neither moves.
    room = Budget(1 << 40, host_bytes=MIB)
    assert tier_for(Case(both, gpu(), room), (value, older)) == {}


def test_two_versions_that_are_both_read_stay() -> None:
    trace = net(CHAIN)
    value = written_by(trace, 1)
    read = trace.values[value].first_read
    assert read is not None
    both = with_older_version(trace, value, reads=(read,))
    assert {value, len(both.values) - 1}.isdisjoint(movable(both))


def test_host_first_then_disk_for_what_is_needed_last() -> None:
    trace = net(CHAIN)
    values = movable(trace)
    assert set(tier_for(Case(trace, gpu(disk=True), PLENTY), values).values()) == {Tier.HOST}
    tight = Budget(1 << 40, host_bytes=2 * MIB)
    assert tier_for(Case(trace, gpu(disk=True), tight), values) == {
        values[0]: Tier.DISK,  # backward needs the first layer's last
        values[1]: Tier.HOST,
        values[2]: Tier.HOST,
    }
    # Without a disk it stays.
    assert tier_for(Case(trace, gpu(), tight), values) == dict.fromkeys(values[1:], Tier.HOST)


def test_capacity_limits_like_a_budget() -> None:
    trace = net(CHAIN)
    capacities = (Capacity(Tier.DEVICE, 1 << 40), Capacity(Tier.HOST, MIB))
    small = replace(gpu(), capacities=capacities)
    assert tier_for(Case(trace, small, PLENTY), movable(trace)) == {movable(trace)[2]: Tier.HOST}


def test_cpu_has_disk_alone() -> None:
    trace = net(CHAIN, device="cpu")
    made = plan("floor", trace, cpu(), PLENTY)
    assert {it.tier for it in made.decisions.values() if isinstance(it, Offload)} == {Tier.DISK}
    # Even where the profile knows of pinned memory, since that is the same RAM.
    tiers = tier_for(Case(trace, gpu(disk=True), PLENTY), movable(trace))
    assert set(tiers.values()) == {Tier.DISK}


def test_without_room_everything_stays_and_the_plan_says_so() -> None:
    trace = net(CHAIN)
    made = plan("floor", trace, gpu(), Budget(1 << 40, host_bytes=0))
    assert made.moves_nothing
    assert any("no other tier has room" in a.reason for a in made.assignments)


def test_unreachable_tier_has_no_room() -> None:
    trace = net(CHAIN)
    assert tier_for(Case(trace, replace(gpu(), links=()), PLENTY), movable(trace)) == {}


@pytest.mark.parametrize("every_boundary", [True, False])
@pytest.mark.parametrize(
    "wish", [Schedule(-5, -5, -5), Schedule(0, 4, 6), Schedule(3, 1, 2), Schedule(5, 7, 99)]
)
def test_any_wish_becomes_legal(every_boundary: bool, wish: Schedule) -> None:
    trace = net(CHAIN, every_boundary=every_boundary)
    value = written_by(trace, 0)
    it = place(trace, value, Tier.HOST, wish)
    if it is not None:
        made = Plan(trace.fingerprint, "test/1", PLENTY, (Assignment(value, it),))
        assert check(trace, gpu(), made, PLENTY).ok
        assert it.free_at < it.copy_in_at


def test_bytes_come_back_only_after_the_original_is_gone() -> None:
    trace = net(CHAIN)
    value = written_by(trace, 0)
    late = released_at(trace, value, 6)
    assert place(late, value, Tier.HOST, Schedule(1, 2, 4)) is None
    assert place(late, value, Tier.HOST, Schedule(1, 2, 7)) == Offload(Tier.HOST, 1, 2, 7, 8)


def test_a_value_that_would_be_back_at_once_is_kept() -> None:
    trace = net(CHAIN)
    values = movable(trace)
    tiers = dict.fromkeys(values, Tier.HOST)
    wishes = {value: Schedule(0, 3, 3 if value == values[0] else 8) for value in values}
    assert set(offloads(trace, tiers, wishes)) == set(values[1:])


def test_a_value_stays_if_another_of_its_storage_would_be_back_at_once() -> None:
    trace = net(CHAIN)
    value = written_by(trace, 1)
    both = with_older_version(trace, value, reads=())
    older = len(both.values) - 1
    tiers = dict.fromkeys((value, older), Tier.HOST)
    wishes = {value: Schedule(1, 3, 6), older: Schedule(1, 3, 6)}
    assert set(offloads(both, tiers, wishes)) == {value, older}
    assert offloads(both, tiers, wishes | {older: Schedule(1, 3, 3)}) == {}


def test_room_is_free_again_when_a_value_is_dropped() -> None:
    trace = net(CHAIN)
    first, second, _ = movable(trace)
    it = trace.values[first]
    # The first is read and dropped just when the second is saved, as in an earlier pass.
    until = trace.values[second].first_save
    values = list(trace.values)
    values[first] = replace(it, saves=(replace(it.saves[0], reads=(until,), dropped=until),))
    case = Case(replace(trace, values=tuple(values)), gpu(), Budget(1 << 40, host_bytes=MIB))
    assert tier_for(case, (first, second)) == {first: Tier.HOST, second: Tier.HOST}


def test_floor_holds_values_only_where_they_are_used() -> None:
    trace = net(VGG)
    made = plan("floor", trace, gpu(), Budget(smallest_budget("floor", trace, gpu(), PLENTY)))
    assert moves(trace, made) == {
        1: (2, 3, 13, 13),
        3: (4, 5, 11, 11),
        4: (5, 6, 10, 10),
    }
    eager = net(VGG, every_boundary=False)
    assert moves(eager, plan("floor", eager, gpu(), PLENTY))[1] == (2, 4, 13, 13)
