"""What is left to the allocator: a part of what comes and goes, none of an optimizer's step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.errors import InfeasibleBudgetError
from belady.ir.curves import curve
from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.legality import check
from belady.ir.margin import moving_peak, needed, rooms
from belady.ir.ops import Phase
from belady.ir.plan import Budget
from belady.ir.trace import Trace
from belady.planners import plan, smallest_budget
from belady.planners.moves import Case
from belady.planners.spread import slack_of
from belady.simulate import bound, simulate
from tests.support.strategies import machine, random_trace

MIB = 1 << 20
ALLOCATOR = Allocator(round_bytes=1, margin_fraction=0.5, margin_bytes=MIB)
MACHINE: HardwareProfile = machine(
    "cuda", link_rate=1e10, disk=False, disk_rate=0.0, allocator=ALLOCATOR
)


def _stepping(workspace_bytes: int) -> Trace:
    """An iteration, and at its end an optimizer's op that takes so much for a while."""
    trace = random_trace(3, 60)
    last = replace(
        trace.ops[-1], phase=Phase.OPTIMIZER, workspace_bytes=workspace_bytes,
        reads=(), writes=(), forward_op=None,
    )  # fmt: skip
    return replace(trace, ops=(*trace.ops, last))


def _held(trace: Trace) -> list[int]:
    return curve(trace, plan("baseline", trace, MACHINE, Budget(1 << 40)), ALLOCATOR)


def test_a_fraction_is_asked_of_all_but_an_optimizers_ops() -> None:
    trace = _stepping(0)
    held = _held(trace)
    before = max(held[:-1])
    assert needed(trace, ALLOCATOR, held) == (int(1.5 * before) + MIB, held.index(before))
    held[-1] = 2 * before
    assert needed(trace, ALLOCATOR, held) == (2 * before + MIB, len(held) - 1)
    assert moving_peak(trace, held) == before


def test_rooms_are_the_most_that_is_safe() -> None:
    trace = _stepping(0)
    *others, last = rooms(trace, ALLOCATOR, 10 * MIB)
    assert last == 9 * MIB
    assert set(others) == {6 * MIB}


@pytest.mark.parametrize("policy", ["auto", "hybrid", "lifetime", "floor"])
def test_a_step_that_just_fits_is_no_reason_to_refuse(policy: str) -> None:
    floor = smallest_budget("floor", _stepping(0), MACHINE, Budget(0))
    persistent = curve(_stepping(0), plan("floor", _stepping(0), MACHINE, Budget(floor)), ALLOCATOR)
    # The step fills the budget but for the bytes that are asked of all.
    trace = _stepping(floor - MIB - persistent[-1])
    assert smallest_budget(policy, trace, MACHINE, Budget(0)) == floor
    made = plan(policy, trace, MACHINE, Budget(floor))
    verdict = check(trace, MACHINE, made, made.budget)
    assert verdict.ok
    assert verdict.peak_op == len(trace.ops) - 1
    assert (slack_of(Case(trace, MACHINE, made.budget), made) >= 0).all()
    assert bound(trace, MACHINE, made.budget).seconds <= simulate(trace, MACHINE, made).seconds
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(policy, replace(trace), MACHINE, Budget(floor - 1))
    assert caught.value.smallest_bytes == floor


def test_of_a_step_before_the_last_backward_a_fraction_is_asked() -> None:
    trace = random_trace(3, 60)
    last = max(save.dropped for value in trace.values for save in value.saves)
    ops = [replace(op, phase=Phase.OPTIMIZER) for op in trace.ops]
    stepping = replace(trace, ops=tuple(ops))
    found = rooms(stepping, ALLOCATOR, 10 * MIB)
    assert set(found[:last]) == {6 * MIB}
    assert set(found[last:]) <= {9 * MIB}
