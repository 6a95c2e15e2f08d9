from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belady.errors import PlanMismatchError
from belady.ir.curves import curve, managed_room, tier_curve
from belady.ir.hardware import Allocator
from belady.ir.plan import Assignment, Decision, Keep, Managed, Offload, Plan, Recompute
from belady.ir.residency import away, intervals, next_anchor, offload_boundaries, reload_end
from belady.ir.trace import Tier, Trace, Use, Value
from tests.support.strategies import traces
from tests.unit.ir.engine import Engine
from tests.unit.ir.moments import (
    BYTES,
    ROOMY,
    drawn,
    drawn_drops,
    drawn_managed,
    drawn_moves,
    plan_of,
    save,
    trace_of,
    transient,
)

TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
ROUNDED = Allocator(64, 0.0, 0)


def asked_for(trace: Trace, plan: Plan) -> bool:
    """Whether backward reads each save of what moves, or none."""
    moved = (trace.values[value] for value in plan.decisions)
    return all(len({bool(save.reads) for save in value.saves}) == 1 for value in moved)


def agrees_with_the_engine(trace: Trace, plan: Plan) -> None:
    engine = Engine(trace, plan).run()
    spans = intervals(trace, plan)
    for tier in TIERS:
        said = tier_curve(spans, tier, len(trace.ops))
        held = [counted[tier] for counted in engine.held]
        if tier is Tier.DEVICE and not asked_for(trace, plan):
            # Bytes that no read is left to ask for are let go before the last handle.
            assert all(a >= b for a, b in zip(said, held, strict=True))
        else:
            assert said == held, tier
    # Worked out from what a plan changes, and twice, as what a trace keeps must stay as it is.
    whole = curve(trace, plan, ROUNDED, spans)
    assert curve(trace, plan, ROUNDED) == curve(trace, plan, ROUNDED) == whole


@settings(max_examples=1000, deadline=None)
@given(st.randoms(use_true_random=False))
def test_bytes_are_where_the_engine_has_them(rng: random.Random) -> None:
    trace = drawn(rng)
    agrees_with_the_engine(trace, plan_of(trace, drawn_moves(rng, trace)))


@settings(max_examples=1000, deadline=None)
@given(st.randoms(use_true_random=False))
def test_managed_bytes_are_where_the_engine_has_them(rng: random.Random) -> None:
    trace = drawn(rng)
    plan = plan_of(trace, drawn_moves(rng, trace) | drawn_managed(rng, trace))
    agrees_with_the_engine(trace, plan)
    room, engine = managed_room(trace, plan, BYTES), Engine(trace, plan).run()
    passing = any(
        isinstance(d, Managed) and d.gone_by == d.prefetch_out_at for d in decisions(plan)
    )
    assert engine.blocks <= room
    if not passing and asked_for(trace, plan):
        assert engine.blocks == room
    spans = intervals(trace, plan)
    torch_alone = tier_curve(spans, Tier.DEVICE, len(trace.ops), BYTES)
    assert curve(trace, plan, BYTES, spans) == [nbytes + room for nbytes in torch_alone]


def decisions(plan: Plan) -> list[Decision]:
    return list(plan.decisions.values())


@settings(max_examples=1000, deadline=None)
@given(st.randoms(use_true_random=False))
def test_recomputed_bytes_are_where_the_engine_has_them(rng: random.Random) -> None:
    trace = drawn(rng)
    agrees_with_the_engine(trace, plan_of(trace, drawn_moves(rng, trace) | drawn_drops(rng, trace)))


@settings(max_examples=200, deadline=None)
@given(traces(max_ops=10), st.randoms(use_true_random=False))
def test_bytes_of_layers_are_where_the_engine_has_them(trace: Trace, rng: random.Random) -> None:
    agrees_with_the_engine(trace, plan_of(trace, drawn_moves(rng, trace)))


@settings(max_examples=500, deadline=None)
@given(st.randoms(use_true_random=False))
def test_away_is_when_the_engine_has_sent_and_freed_and_not_brought(rng: random.Random) -> None:
    trace = drawn(rng)
    for index, move in (drawn_moves(rng, trace) | drawn_drops(rng, trace)).items():
        assert isinstance(move, (Offload, Recompute))
        others = [v for v in trace.saved if trace.values[v].storage == trace.values[index].storage]
        if len(others) > 1:
            continue
        engine = Engine(trace, plan_of(trace, {index: move})).run()
        gone, back = away(trace, index, move)
        off = [boundary for boundary, values in enumerate(engine.off) if index in values]
        assert off == list(range(gone, back))


def two_reads() -> Trace:
    saves = (save(2, (8,), 9, 0), save(4, (6,), 7, 1))
    return trace_of(10, [transient(100, 1, 5, 9)], [Value(0, 0, 1, (), saves)])


def test_actions_wait_for_the_next_anchor() -> None:
    trace = two_reads()
    assert trace.anchors == (2, 4, 6, 8)
    assert [next_anchor(trace, b) for b in (0, 2, 3, 8, 9)] == [2, 2, 4, 8, 10]
    assert offload_boundaries(trace, Offload(Tier.HOST, 1, 3, 5, 6)) == (2, 4, 6)
    assert offload_boundaries(trace, Offload(Tier.HOST, 2, 3, 3, 6)) == (4, 4, 4)


def test_a_copy_in_that_is_due_between_anchors_comes_at_the_next_one() -> None:
    trace = two_reads()
    early = Offload(Tier.HOST, 1, 4, 5, 5)
    assert away(trace, 0, early) == (5, 6)


def test_what_is_freed_after_the_last_drop_is_let_go_with_it() -> None:
    # Nothing else is saved or read until boundary 9, long after the value is dropped.
    values = [Value(0, 0, 0, (), (save(1, (), 4),)), Value(1, 0, 0, (), (save(2, (9,), 10, 1),))]
    storages = [transient(100, 0, 2, 4), transient(7, 0, 10, 10)]
    trace = trace_of(10, storages, values)
    plan = plan_of(trace, {0: Offload(Tier.HOST, 0, 3, 4, 4)})
    held = curve(trace, plan, BYTES)
    assert held == [107, 107, 107, 107, 7, 7, 7, 7, 7, 7]
    assert tier_curve(intervals(trace, plan), Tier.HOST, 10) == [0, 100, 100, 100] + [0] * 6


def test_a_value_saved_again_after_it_was_dropped_stays() -> None:
    saves = (save(1, (3,), 4, 0), save(6, (8,), 9, 1))
    trace = trace_of(10, [transient(100, 0, 7, 9)], [Value(0, 0, 0, (), saves)])
    plan = plan_of(trace, {0: Offload(Tier.HOST, 0, 1, 3, 3)})
    assert curve(trace, plan, BYTES) == [100] * 3 + [200] + [100] * 5 + [0]
    agrees_with_the_engine(trace, plan)


def sharing() -> Trace:
    """Two values of one storage: the first is read at 7 and dropped at 8, the other 9 and 10."""
    values = [
        Value(0, 0, 0, (), (save(1, (7,), 8, 0),)),
        Value(0, 1, 2, (), (save(3, (9,), 10, 1),)),
    ]
    return trace_of(12, [transient(100, 0, 4, 10)], values)


@pytest.mark.parametrize(
    ("moved", "held"),
    [
        # The first alone gains nothing: the second holds the original while its copy comes back.
        ((0,), [100] * 7 + [200] + [100] * 2 + [0, 0]),
        ((1,), [100] * 8 + [0, 100, 0, 0]),
        ((0, 1), [100] * 4 + [0] * 3 + [100, 0, 100, 0, 0]),
    ],
)
def test_a_kept_value_holds_the_storage_until_it_is_dropped(
    moved: tuple[int, ...], held: list[int]
) -> None:
    trace = sharing()
    moves = {0: Offload(Tier.HOST, 0, 3, 7, 7), 1: Offload(Tier.HOST, 2, 3, 9, 9)}
    plan = plan_of(trace, {value: moves[value] for value in moved})
    assert curve(trace, plan, BYTES) == held
    agrees_with_the_engine(trace, plan)


def test_bytes_that_backward_hands_on_are_held_to_the_end() -> None:
    value = Value(0, 0, 0, (), (save(1, (5,), 6),))
    trace = trace_of(10, [transient(100, 0, 2, 9)], [value])
    assert reload_end(trace, value) == 9
    moved = curve(trace, plan_of(trace, {0: Offload(Tier.HOST, 0, 1, 5, 5)}), BYTES)
    assert moved == [100] * 2 + [0] * 3 + [100] * 4 + [0]


def test_bytes_are_held_as_long_as_ops_use_them() -> None:
    used = Value(0, 0, 0, (Use(1), Use(7)), (save(1, (5,), 5),))
    other = Value(0, 1, 2, (), (save(3, (9,), 10, 1),))
    trace = trace_of(12, [transient(100, 0, 4, 10)], [used, other])
    assert reload_end(trace, used) == 8
    moves = {0: Offload(Tier.HOST, 0, 3, 5, 5), 1: Offload(Tier.HOST, 2, 3, 9, 9)}
    held = curve(trace, plan_of(trace, dict(moves)), BYTES)
    assert held == [100] * 4 + [0] + [100] * 3 + [0, 100, 0, 0]


def test_a_later_death_of_another_value_is_not_a_handing_on() -> None:
    trace = sharing()
    assert [reload_end(trace, value) for value in trace.values] == [8, 10]


def test_spans_can_be_given() -> None:
    trace = sharing()
    plan = plan_of(trace, {1: Offload(Tier.HOST, 2, 3, 9, 9)})
    assert curve(trace, plan, BYTES, intervals(trace, plan)) == curve(trace, plan, BYTES)


@pytest.mark.parametrize("op", [0, 99, -1])
def test_an_unknown_algorithm_is_named(op: int) -> None:
    trace = sharing()
    plan = Plan(trace.fingerprint, "by hand", ROOMY, (), layer_algorithms=((op, "winograd"),))
    with pytest.raises(PlanMismatchError, match=rf"op {op} has no algorithm 'winograd'"):
        curve(trace, plan, BYTES)


def test_assignments_of_what_is_kept_change_nothing() -> None:
    trace = sharing()
    kept = Plan(trace.fingerprint, "by hand", ROOMY, (Assignment(0, Keep()),))
    assert intervals(trace, kept) == intervals(trace, plan_of(trace, {}))
