"""What goes on where the device ran out of memory under a plan."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from belady.errors import InfeasibleBudgetError
from belady.ir.plan import Budget
from belady.ir.timeline import Measured, TierPeak
from belady.ir.trace import Tier
from belady.measure.stages import Policy
from belady.measure.tightening import NOTHING
from belady.measure.trial import Trial, best
from belady.measure.verification import Verification
from belady.planners import smallest_budget
from tests.support.builder import OpSpec, build_trace
from tests.unit.report.drawn import ALLOCATOR, GPU, MIB

TRACE = build_trace([OpSpec(nbytes=MIB, device_us=400)] * 24)
HARDWARE = replace(GPU, allocator=replace(ALLOCATOR, margin_fraction=0.1))
LEAST = smallest_budget("floor", TRACE, HARDWARE, Budget(1 << 40))


def lost(trial: Trial) -> Trial:
    return replace(trial, measured=NOTHING)


def asked(budget: int, policy: str = "lifetime") -> tuple[Verification, Trial]:
    verification = Verification(Policy(policy, Budget(budget)), HARDWARE)
    return verification, verification.first(TRACE)


def margin(trial: Trial) -> float:
    return trial.hardware.allocator.margin_fraction


def test_margins_grow_and_then_all_moves() -> None:
    verification, trial = asked(3 * LEAST)
    tried, seen = [], [trial]
    while True:
        tried.append(lost(seen[-1]))
        found = verification.tighter(TRACE, tried)
        if found is None:
            break
        seen.append(found)
    assert [it.policy for it in seen] == ["lifetime", "lifetime", "lifetime", "floor"]
    margins = [margin(it) for it in seen]
    assert margins[0] < margins[1] < margins[2]
    assert margins[3] == 0
    assert all(one.plan.decisions != two.plan.decisions for one, two in pairwise(seen))
    assert len(verification.notes) == 3
    assert all("ran out of memory" in note for note in verification.notes)


def test_launches_leave_what_an_iteration_lacked_that_was_issued() -> None:
    """Their plan runs once as it is issued; what flushes alone have asked for is not left."""
    verification, trial = asked(3 * LEAST)
    allocator = replace(trial.hardware.allocator, margin_fraction=0.5)
    wide = replace(trial, hardware=replace(trial.hardware, allocator=allocator))
    assert margin(verification.launched(TRACE, wide, 0)[1]) <= 0.1
    assert verification.tighter(TRACE, [lost(trial)]) is not None
    assert margin(verification.launched(TRACE, wide, 0)[1]) == 0.5


def test_where_a_margin_changes_nothing_all_moves_at_once() -> None:
    verification, trial = asked(1 << 40, "auto")
    assert trial.plan.moves_nothing
    found = verification.tighter(TRACE, [lost(trial)])
    assert found is not None
    assert found.policy == "floor"
    assert not found.plan.moves_nothing


def test_a_plan_that_ran_out_is_never_the_best() -> None:
    _, trial = asked(2 * LEAST)
    slow = Measured(1, 1e9, (1e9,), (TierPeak(Tier.DEVICE, 1),), allocation_retries=7)
    assert best([lost(trial), replace(trial, measured=slow)]).measured is slow
    assert NOTHING.seconds == math.inf


def test_a_budget_without_room_for_the_floor_is_left_as_it_is() -> None:
    verification, trial = asked(2 * LEAST)

    def refuse(*_: object) -> None:
        raise InfeasibleBudgetError(
            needed_bytes=2, budget_bytes=1, smallest_bytes=2, op="op", module=""
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_plan", refuse)
        assert verification.tighter(TRACE, [lost(trial)]) is None
    assert verification.notes == []
