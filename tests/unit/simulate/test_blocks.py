"""Blocks as torch's allocator cuts them: by hand, and against a slow allocator, plain to see."""

from __future__ import annotations

import random
from dataclasses import replace
from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belady.ir.curves import curve, tier_curve
from belady.ir.hardware import Allocator
from belady.ir.plan import Assignment, Budget, Encode, Keep, Offload, Plan, Recompute
from belady.ir.residency import intervals
from belady.ir.scratch import chosen_workspaces, replay_steps
from belady.ir.trace import StorageKind, Tier, Trace
from belady.simulate import blocks
from belady.simulate.blocks import blocks_of, excess, gradient_bytes, in_blocks, walked
from belady.simulate.stretch import LEAST, Stretch, end_of
from tests.properties import test_recompute, test_simulate
from tests.support.builder import OpSpec, build_trace
from tests.unit.simulate.cases import trace_of

MIB = 1 << 20
EXACT = Allocator(1, 0.0, 0)


def reserved(trace: Trace, *assignments: Assignment, gradients_apart: bool = False) -> int:
    plan = Plan(trace.fingerprint, "made", Budget(1 << 60), assignments)
    walk = walked(trace, plan, EXACT)
    return blocks_of(walk, gradients_apart=gradients_apart).reserved_bytes()


def test_what_dies_makes_room_for_what_is_as_large() -> None:
    chain = trace_of([1.0] * 6, [(8 * MIB, at, at + 1) for at in range(5)])
    assert reserved(chain) == 2 * 8 * MIB


def test_a_hole_between_others_is_lost_for_what_is_larger() -> None:
    # Small, large, small; the large one dies and a larger one comes.
    sizes = [(4 * MIB, 0, 7), (8 * MIB, 1, 2), (4 * MIB, 2, 7), (10 * MIB, 5, 7)]
    trace = trace_of([1.0] * 8, sizes)
    held = curve(trace, Plan(trace.fingerprint, "", Budget(0)), EXACT)
    assert max(held) == (4 + 4 + 10) * MIB
    assert reserved(trace) == (4 + 8 + 4 + 10) * MIB


def test_moving_a_value_away_makes_a_hole_and_bringing_it_back_takes_one() -> None:
    trace = trace_of([1.0] * 8, [(8 * MIB, 0, 7), (8 * MIB, 3, 5)])
    assert reserved(trace) == 16 * MIB
    away = Assignment(0, Offload(Tier.HOST, 0, 1, 6, 7))
    assert reserved(trace, away) == 8 * MIB
    assert reserved(trace, Assignment(0, Keep())) == 16 * MIB


def test_a_replay_takes_back_what_it_is_done_with() -> None:
    op = OpSpec(nbytes=8 * MIB, saves_input=False, saves_output=True, replayable=True)
    trace = build_trace([op] * 6)
    last = trace.ops[5].writes[0]
    away = Assignment(last, Recompute((1, 2, 3, 4, 5), trace.values[last].first_read or 0))
    # Five results in a row, of which two are there at once, and the last one is the value.
    assert reserved(trace, away) == reserved(trace)


def during(replay: blocks._Again) -> tuple[Stretch, dict[int, int]]:
    """Where the blocks are that a replay leaves."""
    stretch, where = Stretch(), dict[int, int]()
    for block, nbytes in blocks._during(replay):
        if nbytes:
            where[block] = stretch.take(nbytes)
        elif block in where:
            stretch.free(where.pop(block))
    return stretch, where


def test_what_is_made_again_lies_where_its_own_op_puts_it() -> None:
    specs = [OpSpec(nbytes=it * MIB, saves_output=True, replayable=True) for it in (2, 10, 8)]
    trace = build_trace(specs)
    value = trace.ops[2].writes[0]
    steps = replay_steps(trace, value, Recompute((1, 2), 3), EXACT)
    of = {trace.values[value].storage: (7, 8 * MIB)}
    stretch, where = during(blocks._Again(2, of, steps))
    # Above what the op before it made, which leaves a hole.
    assert where == {7: 10 * MIB}
    assert stretch.take(10 * MIB) == 0


@pytest.mark.parametrize(("place", "address"), [(0, 0), (1, 4 * MIB)])
def test_a_replay_makes_the_results_of_an_op_one_after_another(place: int, address: int) -> None:
    """Indices of a pooling, say, lie behind its result, which goes at once."""
    op = OpSpec(nbytes=4 * MIB, saves_output=True, replayable=True)
    trace = build_trace([op] * 2)
    both = tuple(of.writes[0] for of in trace.ops[:2])
    pooling = replace(trace.ops[1], writes=both, shortcut=None)
    trace = replace(trace, ops=(trace.ops[0], pooling, *trace.ops[2:]))
    steps = replay_steps(trace, both[place], Recompute((1,), 3), EXACT)
    of = {trace.values[both[place]].storage: (7, 4 * MIB)}
    stretch, where = during(blocks._Again(1, of, steps))
    assert where == {7: address}
    assert stretch.end == 8 * MIB


def steps_of(trace: Trace, *assignments: Assignment) -> list[blocks._Step]:
    plan = Plan(trace.fingerprint, "made", Budget(1 << 60), assignments)
    return walked(trace, plan, EXACT).steps


def test_copies_come_back_in_the_order_of_the_plan() -> None:
    trace = trace_of([1.0] * 8, [(8 * MIB, 0, 6), (4 * MIB, 1, 7)])
    moves = [Assignment(value, Offload(Tier.HOST, 1, 2, 5, 6 + value)) for value in (0, 1)]
    for order in (1, -1):
        back = [nbytes for _, nbytes in steps_of(trace, *moves[::order])[5].back]
        assert back == [8 * MIB, 4 * MIB][::order]


def test_what_is_decoded_comes_after_copies_and_in_the_order_of_what_made_it() -> None:
    op = OpSpec(nbytes=8 * MIB, saves_output=True, replayable=True)
    trace = build_trace([op] * 6)
    made = [of.writes[0] for of in trace.ops[:3]]
    at = trace.values[made[2]].first_read or 0
    packed = Assignment(made[2], Encode("bits", 2 * MIB, 3, at))
    replay = Assignment(made[1], Recompute((1,), at))
    copy = Assignment(made[0], Offload(Tier.HOST, 1, 2, at, at))
    steps = steps_of(trace, packed, replay, copy)
    assert [nbytes for _, nbytes in steps[at].back] == [8 * MIB]
    assert sorted(again(it) for it in steps[at].replays) == [(1, [8 * MIB]), (2, [8 * MIB])]
    assert [again(it) for it in steps[3].replays] == [(2, [2 * MIB])]


def again(replay: blocks._Again) -> tuple[int, list[int]]:
    return replay.order, [nbytes for _, nbytes in replay.blocks.values()]


@pytest.mark.parametrize(("apart", "expected"), [(False, 16), (True, 24)])
def test_memory_apart_is_idle_while_there_are_no_gradients(apart: bool, expected: int) -> None:
    trace = trace_of([1.0] * 8, [(8 * MIB, 0, 2), (8 * MIB, 1, 2), (8 * MIB, 5, 7)])
    *others, last = trace.storages
    trace = replace(trace, storages=(*others, replace(last, kind=StorageKind.GRADIENT)))
    assert reserved(trace, gradients_apart=apart) == expected * MIB


def gradients(*spans: tuple[int, int, int]) -> Trace:
    """Gradients of so many bytes, first ops and last ones beside a value that is always there."""
    trace = trace_of([1.0] * 8, [(4 * MIB, 0, 7), *spans])
    first, *others = trace.storages
    lasting = (replace(it, kind=StorageKind.GRADIENT) for it in others)
    return replace(trace, storages=(first, *lasting))


def test_a_gradient_apart_is_copied_from_where_it_was_made() -> None:
    trace = gradients((8 * MIB, 5, 7), (2 * MIB, 6, 7))
    # Both copies, and the larger one of those that they are made from, beside the value.
    assert reserved(trace, gradients_apart=True) == (8 + 2 + 4 + 8) * MIB


def test_gradients_that_are_not_there_at_once_share_their_memory() -> None:
    trace = gradients((8 * MIB, 1, 2), (8 * MIB, 4, 5), (2 * MIB, 4, 5))
    plan = Plan(trace.fingerprint, "made", Budget(1 << 60))
    assert gradient_bytes(trace, plan, 0) == 10 * MIB
    assert gradient_bytes(trace, plan, 2 * MIB) == 8 * MIB
    assert reserved(trace, gradients_apart=True) == (10 + 4 + 8 + 2) * MIB


def test_the_most_that_blocks_need_is_with_small_ones_or_without() -> None:
    """A small block beside a hole that joins it, or leaves it too small for what comes."""
    sizes = [8, 3, 8, 0, 0, 11]
    numbers = [0, 1, 2, 0, 1, 3]
    made = [(at, size * MIB) for at, size in zip(numbers, sizes, strict=True)]
    found = blocks.Blocks(5, [*made, (2, 0), (3, 0)])
    assert found.reserved_bytes() == 5 + 19 * MIB
    assert found.most_bytes(found.reserved_bytes()) == 5 + 27 * MIB
    assert found.most_bytes(30 * MIB) == 30 * MIB


def moving(budget_bytes: int) -> tuple[Trace, Plan]:
    """A trace of one value, and a plan that moves it."""
    trace = trace_of([1.0] * 8, [(8 * MIB, 0, 7)])
    away = Assignment(0, Offload(Tier.HOST, 0, 1, 6, 7))
    return trace, Plan(trace.fingerprint, "made", Budget(budget_bytes), (away,))


def reserving(monkeypatch: pytest.MonkeyPatch, among: int, apart: int) -> None:
    def made(*_: object, gradients_apart: bool) -> blocks.Blocks:
        return blocks.Blocks(apart if gradients_apart else among, [])

    monkeypatch.setattr(blocks, "blocks_of", made)


@pytest.mark.parametrize(("budget", "apart"), [(159, False), (161, True)])
def test_gradients_are_apart_unless_that_costs_a_twentieth_of_the_budget(
    budget: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserving(monkeypatch, 16 * MIB, 24 * MIB)
    trace, plan = moving(budget * MIB)
    assert in_blocks(trace, plan, EXACT) == ((24 if apart else 16) * MIB, apart)
    # Under a plan that moves nothing they stay where they are.
    assert in_blocks(trace, replace(plan, assignments=()), EXACT) == (16 * MIB, False)


@pytest.mark.parametrize(("budget", "apart"), [(101, False), (102, False), (103, True)])
def test_gradients_stay_where_they_are_if_all_fits_so_alone(
    budget: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beside 2 % for small blocks: 98.9 and 102 MiB.
    reserving(monkeypatch, 97 * MIB, 100 * MIB)
    assert in_blocks(*moving(budget * MIB - 1), EXACT).gradients_apart is apart


def test_what_is_held_at_once_is_the_most_that_lives() -> None:
    sizes = [(0, 8), (1, 3), (0, 0), (2, 4), (7, 0), (2, 0), (2, 0), (1, 0), (0, 12), (0, 0)]
    found = blocks.Blocks(5, [(number, size * MIB) for number, size in sizes])
    assert found.held_bytes() == 5 + 12 * MIB
    assert blocks.Blocks(5, []).held_bytes() == 5


@pytest.mark.parametrize(("over", "apart"), [(0, True), (1, False)])
def test_gradients_are_not_apart_where_what_is_held_beside_has_no_room(
    over: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As they are foretold neither fits, and apart is better; what is held at once decides.
    nbytes, budget = 100 * MIB, 102 * MIB

    def made(*_: object, gradients_apart: bool) -> blocks.Blocks:
        piece = nbytes // 4 + over if gradients_apart else 2 * nbytes // 4
        pieces = [(at, piece) for at in range(4)]
        holes = [(at + 9, 8 * MIB if gradients_apart else 16 * MIB) for at in range(4)]
        events = [(hole, 0) for hole, _ in holes]
        return blocks.Blocks(0, [*holes, *events, *pieces, *((it, 0) for it, _ in pieces)])

    monkeypatch.setattr(blocks, "blocks_of", made)
    monkeypatch.setattr(blocks.Blocks, "reserved_bytes", lambda _: 2 * budget)
    assert in_blocks(*moving(budget), EXACT).gradients_apart is apart


def test_what_is_over_a_budget_is_said_with_room_for_small_blocks() -> None:
    trace = trace_of([1.0] * 6, [(8 * MIB, at, at + 1) for at in range(5)])
    stated = replace(EXACT, margin_fraction=0.1)

    def over(budget: float, allocator: Allocator = stated) -> float:
        plan = Plan(trace.fingerprint, "made", Budget(int(budget * MIB)), ())
        return excess(trace, plan, allocator)

    assert over(16 * 1.03) < 0 < over(16 * 1.01)
    assert over(8) == pytest.approx(1.04)
    # Pages are whole, so that a small budget needs more.
    assert over(16, replace(stated, margin_bytes=MIB)) == pytest.approx(1.32 / 16)
    # Small blocks are none of those that are there all the time.
    settled = replace(stated, settled_bytes=16 * MIB)
    assert over(16, settled) == pytest.approx(0)
    # Without a margin nothing is lost between blocks.
    assert over(8, EXACT) == 0


def test_parameters_and_workspaces_count_and_small_blocks_do_not() -> None:
    trace = trace_of([1.0] * 4, [(8 * MIB, 0, 3), (8 * MIB, 1, 2), (MIB // 2, 1, 2)])
    first, *others = trace.storages
    parameter = replace(first, kind=StorageKind.PARAMETER, birth=0, released=4, death=4)
    ops = [replace(op, workspace_bytes=at * 3 * MIB) for at, op in enumerate(trace.ops)]
    trace = replace(trace, storages=(parameter, *others), ops=tuple(ops))
    # At op 2 the workspace of 6 MiB lies beside the value, at op 3 that of 9 MiB takes its hole.
    assert reserved(trace) == (8 + 8 + 6) * MIB


class Slow:
    """Blocks in order of address, each searched from the first to the last."""

    def __init__(self) -> None:
        self.found: list[tuple[int, bool]] = []  # bytes, taken

    def take(self, nbytes: int) -> int:
        holes = [(size, at) for at, (size, taken) in enumerate(self.found) if not taken]
        inner = [it for it in holes if it[1] < len(self.found) - 1 and it[0] >= nbytes]
        if inner:
            size, at = min(inner)
        elif self.found and not self.found[-1][1]:
            at = len(self.found) - 1
            size = max(nbytes, self.found[at][0])
        else:
            at, size = len(self.found), nbytes
        rest = [(size - nbytes, False)] if size - nbytes >= LEAST else []
        self.found[at : at + 1] = [(size - sum(it for it, _ in rest), True), *rest]
        return sum(it for it, _ in self.found[:at])

    def free(self, address: int) -> None:
        at = next(i for i in range(len(self.found)) if self.address(i) == address)
        self.found[at] = (self.found[at][0], False)
        for left in (at, at - 1):
            pair = self.found[max(left, 0) : left + 2]
            if left >= 0 and len(pair) == 2 and not pair[0][1] and not pair[1][1]:
                self.found[left : left + 2] = [(pair[0][0] + pair[1][0], False)]

    def address(self, at: int) -> int:
        return sum(size for size, _ in self.found[:at])


@given(st.randoms(use_true_random=False))
def test_blocks_lie_where_a_search_of_all_would_put_them(rng: random.Random) -> None:
    stretch, slow = Stretch(), Slow()
    living: list[int] = []
    for _ in range(60):
        if living and rng.random() < 0.45:
            address = living.pop(rng.randrange(len(living)))
            stretch.free(address)
            slow.free(address)
        else:
            nbytes = rng.choice((2, 3, 5, 8, 13)) * MIB + rng.choice((0, 0, MIB // 2))
            living.append(stretch.take(nbytes))
            assert living[-1] == slow.take(nbytes)
        assert stretch.end == sum(size for size, _ in slow.found)


@given(st.randoms(use_true_random=False), st.booleans())
def test_iterations_that_leave_nothing_are_alike(rng: random.Random, leaves: bool) -> None:
    living: list[int] = []
    events: list[tuple[int, int]] = []
    for block in range(40):
        events.append((block, rng.choice((2, 3, 5, 8, 13)) * MIB))
        living.append(block)
        while living and rng.random() < 0.45:
            events.append((living.pop(rng.randrange(len(living))), 0))
    events += [(block, 0) for block in living[leaves:]]
    stretch = Stretch()
    for _ in range(2):
        where = {}
        for block, nbytes in events:
            if nbytes:
                where[block] = stretch.take(nbytes)
            else:
                stretch.free(where[block])
    assert end_of(events, 0) == stretch.end


@given(case=st.one_of(test_simulate.cases(encode=True), test_recompute.cases()))
def test_never_less_than_what_is_held(case: tuple) -> None:  # type: ignore[type-arg]
    trace, _, plan = case
    allocator = Allocator(1, 0.0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "SMALL", 0)
        walk = walked(trace, plan, allocator)
        found = blocks_of(walk, gradients_apart=False).reserved_bytes()
    # Not `curve`: it counts what an op makes beside what a replay before it takes for a while.
    held = tier_curve(intervals(trace, plan), Tier.DEVICE, len(trace.ops), allocator)
    chosen = chosen_workspaces(trace, plan)
    needed = [chosen.get(at, op.workspace_bytes) for at, op in enumerate(trace.ops)]
    assert found >= max(map(add, held, needed), default=0)
