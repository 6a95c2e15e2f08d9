"""The hybrid policy without convolutions that run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from belady.ir.legality import check
from belady.ir.plan import Budget, Plan, Recompute
from belady.ir.trace import Trace
from belady.planners import plan, smallest_budget
from belady.planners.hybrid import HYBRID
from belady.simulate import simulate
from tests.unit.planners.nets import ATEN, gpu, quick_layers


def planned(policy: str, trace: Trace) -> Plan:
    least, most = (smallest_budget(it, trace, gpu(), Budget(0)) for it in ("floor", "baseline"))
    return plan(policy, trace, gpu(), Budget((2 * least + most) // 3))


def run_again(made: Plan, trace: Trace) -> set[str]:
    replays = (it for it in made.decisions.values() if isinstance(it, Recompute))
    return {trace.ops[index].name for it in replays for index in it.ops}


def test_no_convolution_runs_again_where_others_do() -> None:
    trace = quick_layers(8)
    assert ATEN["conv"] in run_again(planned("hybrid", trace), trace)
    made = planned("hybrid_cheap", trace)
    assert run_again(made, trace) == {ATEN["norm"]}
    verdict = check(trace, gpu(), made, made.budget)
    assert verdict.ok
    assert simulate(trace, gpu(), made).seconds == pytest.approx(made.predicted_seconds)


def test_without_convolutions_it_is_the_hybrid_policy() -> None:
    trace = quick_layers(8, convolutions=False)
    made, usual = planned("hybrid_cheap", trace), planned("hybrid", trace)
    assert made.planner == usual.planner.replace("hybrid/", "hybrid_cheap/")
    assert replace(made, planner=usual.planner) == usual


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_asked_of_it_is_asked_of_the_policy(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def noted(*of: Any, exact: bool) -> Plan:
        asked.append(exact)
        return HYBRID(*of, exact=exact)

    monkeypatch.setattr("belady.planners.cheap.HYBRID", noted)
    plan("hybrid_cheap", quick_layers(4), gpu(), Budget(1 << 40), exact=exact)
    assert asked == [exact]
