"""The smallest values stay: what is worth a copy depends on what else there is."""

from __future__ import annotations

import pytest

from belady.ir.plan import Budget
from belady.planners import hybrid, plan, smallest_budget
from belady.planners.mix import Mixer
from belady.planners.moves import Case, movable
from belady.planners.spread import boundary_times
from belady.planners.wish import Wish
from tests.support.builder import OpSpec, build_trace
from tests.unit.planners.nets import gpu
from tests.unit.planners.test_hybrid import budgets

MIB = 1 << 20
LARGE = [OpSpec(nbytes=4 * MIB)] * 12
SMALL = [OpSpec(nbytes=4096)] * 4
TOO_LITTLE = "kept: too little to gain from moving it"


def moving(mixer: Mixer) -> set[int]:
    return {*mixer.ways.nbytes}


def test_what_is_small_beside_all_else_stays() -> None:
    trace = build_trace([*LARGE, *SMALL])
    case = Case(trace, gpu(), Budget(1 << 30))
    every = {*movable(trace)}
    small = {it for it in every if trace.storages[trace.values[it].storage].nbytes < MIB}
    assert len(small) == 2
    assert moving(Mixer(case, "mix/1")) == every
    assert moving(Mixer(case, "mix/1", 1e-3)) == every - small
    # All of one size or none of it.
    assert moving(Mixer(case, "mix/1", 1e-4)) == every
    (budget,) = budgets(trace, gpu(), 0.5)
    made = plan("hybrid", trace, gpu(), budget)
    assert made.decisions
    assert not made.decisions.keys() & small
    mixer = Mixer(Case(trace, gpu(), budget), "mix/1", 1e-3)
    mixed, *_ = mixer.make(Wish(frozenset()), boundary_times(trace, None))
    assert {it.reason for it in mixed.assignments if it.value in small} == {TOO_LITTLE}


def test_where_all_is_small_all_may_move() -> None:
    case = Case(build_trace([OpSpec(nbytes=4096)] * 40), gpu(), Budget(1 << 30))
    assert moving(Mixer(case, "mix/1", 1e-3)) == {*movable(case.trace)}


def test_all_moves_where_less_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = build_trace([*LARGE, *SMALL])
    least = smallest_budget("hybrid", trace, gpu(), Budget(0))
    monkeypatch.setattr(hybrid, "DUST", 0.0)
    assert least == smallest_budget("hybrid", trace, gpu(), Budget(0))
    monkeypatch.setattr(hybrid, "DUST", 0.5)
    assert plan("hybrid", trace, gpu(), Budget(least)).decisions
