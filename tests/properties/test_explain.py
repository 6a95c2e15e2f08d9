"""For any trace, machine and policy: what is said of a value holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belady.errors import InfeasibleBudgetError
from belady.explain import describe, explain
from belady.explain.choices import changed, keep
from belady.explain.document import Explanation
from belady.ir.files import dumps, loads
from belady.ir.legality import check
from belady.ir.plan import Budget
from belady.ir.run import Run
from belady.ir.trace import Tier
from belady.planners import plan as make_plan
from belady.planners import smallest_budget
from belady.simulate import simulate
from tests.support.strategies import instances


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Any trace on any machine, with as little memory as the policy needs or some more."""
    trace, hardware = draw(instances(max_ops=10))
    policy = draw(st.sampled_from(("floor", "lifetime", "hybrid", "vdnn_all", "auto")))
    least = smallest_budget(policy, trace, hardware, Budget(0))
    budget = Budget(int(least * draw(st.sampled_from((1.0, 1.2, 2.0)))))
    try:
        plan = make_plan(policy, trace, hardware, budget)
    except InfeasibleBudgetError as error:
        plan = make_plan(policy, trace, hardware, Budget(error.smallest_bytes))
    # As given, or refused by its own budget.
    given_bytes = draw(st.sampled_from((budget.device_bytes, budget.device_bytes // 2)))
    plan = replace(plan, budget=Budget(given_bytes))
    return Run(trace, hardware, plan, simulate(trace, hardware, plan))


@settings(deadline=None)
@given(runs(), st.data())
def test_figures_and_budgets_hold(run: Run, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(run.trace.values) - 1))
    explanation = explain(run, str(index))
    planned = explanation.planned
    assert planned.seconds == run.predicted.seconds
    assert planned.peak_bytes == run.predicted.peak(Tier.DEVICE)
    assert explanation.notes == ()
    assert loads(Explanation, dumps(explanation)) == explanation
    assert f"Value {index}: " in describe(explanation)
    (story,) = explanation.values
    if story.weighed is None:
        assert story.stays
        return
    kept = changed(run.plan, keep(story.weighed.values))
    enough, short = (Budget(story.weighed.keep_bytes + more) for more in (0, -1))
    assert check(run.trace, run.hardware, kept, enough).ok
    assert not check(run.trace, run.hardware, kept, short).ok
    cost = run.predicted.seconds - simulate(run.trace, run.hardware, kept).seconds
    assert story.weighed.cost_seconds == pytest.approx(cost, abs=1e-8 * planned.seconds)
    for choice in story.weighed.choices:
        assert (choice.outcome is not None) or choice.problems
        if choice.outcome is not None:
            fits = choice.outcome.needed_bytes <= run.plan.budget.device_bytes
            assert choice.legal == fits
    legal = [choice for choice in story.weighed.choices if choice.legal]
    if legal:
        best = story.weighed.choices[story.weighed.next_best]
        assert best.legal
        assert best.seconds_change == min(choice.seconds_change for choice in legal)
    else:
        assert story.weighed.next_best == -1


@settings(deadline=None, max_examples=50)
@given(runs())
def test_modules_and_the_largest_are_explained(run: Run) -> None:
    for what in ("*", "layer0", None):
        explanation = explain(run, what)
        assert loads(Explanation, dumps(explanation)) == explanation
        assert describe(explanation)
        if explanation.module is not None and what == "*":
            assert explanation.module.values == len(run.trace.saved)
            assert sum(it.values for it in explanation.module.decisions) == len(run.trace.saved)
