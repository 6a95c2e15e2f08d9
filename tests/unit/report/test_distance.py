"""How far a plan is from the bound: true, in words, and left out where it cannot be had."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given

from belady.explain import describe as tell
from belady.explain import explain
from belady.ir.plan import Budget, Managed, Plan, Workspace
from belady.ir.run import Run
from belady.ir.timeline import Timeline
from belady.planners import smallest_budget
from belady.report.distance import HASTY, distance
from belady.report.html import page
from belady.report.text import describe
from belady.simulate import bound
from belady.units import format_seconds
from tests.support.builder import build_trace
from tests.support.strategies import machine, random_trace
from tests.unit.report.drawn import ALLOCATOR, MIB, SPECS, run_of, runs
from tests.unit.report.pages import Page

SLOW = machine("cuda", link_rate=1e9, disk=False, disk_rate=1e9, allocator=ALLOCATOR)


def tight(policy: str = "floor") -> Run:
    trace = build_trace(SPECS)
    budget = smallest_budget(policy, trace, SLOW, Budget(1 << 40))
    return run_of(trace, SLOW, policy, budget + MIB)


def test_it_is_the_plans_distance_from_the_bound() -> None:
    run = tight()
    least = bound(run.trace, run.hardware, run.plan.budget).seconds
    found = distance(run)
    assert found.seconds == pytest.approx(least, rel=1e-6)
    assert found.above == pytest.approx(run.predicted.seconds / least - 1, rel=1e-4)
    assert found.above > 0.01
    assert found.sentence == (
        f"No plan can be faster than {format_seconds(least)} in this budget (bound): this one is "
        f"predicted {found.above:.1%} above it."
    )


def test_a_plan_that_keeps_everything_is_as_fast_as_any() -> None:
    run = run_of(policy="baseline", budget=1 << 40)
    assert distance(run).above == 0
    assert "this one is predicted to be as fast" in distance(run).sentence


def test_all_reports_say_it() -> None:
    run = tight()
    said = distance(run).sentence
    assert said in describe(run)
    assert said in Page(page(run)).text.replace("\xa0", " ")
    explained = explain(run)
    assert said in tell(explained)
    assert explained.bound_seconds == distance(run).seconds


@given(runs())
def test_no_plan_is_said_to_beat_the_bound(run: Run) -> None:
    found = distance(run)
    assert found.above >= 0
    assert (found.seconds is None) == bool(found.unknown)
    if found.seconds is not None:
        assert found.seconds <= run.predicted.seconds * (1 + 1e-4)
    else:
        assert run.plan.workspace is Workspace.MEMORY or run.plan.layer_algorithms


def test_without_scipy_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert distance(tight()).seconds is None
    assert "pip install 'belady[solver]'`." in describe(tight())


def test_what_the_bound_does_not_cover_is_not_compared() -> None:
    run = tight()
    managed = replace(run.plan.assignments[0], decision=Managed(1, 2, 3, 4, faults=False))
    unlike = replace(run.plan, assignments=(managed, *run.plan.assignments[1:]))
    assert "managed memory" in distance(replace(run, plan=unlike)).sentence
    lean = replace(run.plan, workspace=Workspace.MEMORY)
    assert "workspace" in distance(replace(run, plan=lean)).sentence


def test_what_is_too_fast_to_be_true_is_not_praised() -> None:
    run = tight()
    assert "by other means" in distance(run, distance(run).seconds / 2).sentence  # type: ignore[operator]


def test_a_budget_in_which_nothing_fits_has_no_bound() -> None:
    run = tight()
    starved = replace(run, plan=replace(run.plan, budget=Budget(1024)))
    assert "no plan keeps to this budget" in distance(starved).sentence


def test_a_solver_out_of_time_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belady.report.distance._SOLVER_SECONDS", 0.0)
    trace = random_trace(2, 600)
    least = smallest_budget("floor", trace, SLOW, Budget(1 << 40))
    assert "in time" in distance(run_of(trace, SLOW, "floor", least * 3 // 2)).sentence


def test_a_page_of_a_long_trace_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(random_trace(1, HASTY + 2), SLOW, "baseline", 1 << 40)
    assert len(run.trace.ops) > HASTY
    monkeypatch.setattr("belady.report.distance.bound", lambda *_, **__: pytest.fail("asked"))
    assert f"above {HASTY}" in distance(run, longest=HASTY).sentence


def test_thirty_thousand_ops_take_seconds_at_most() -> None:
    trace = random_trace(2, 30_000)
    least = smallest_budget("floor", trace, SLOW, Budget(1 << 40))
    # The bound knows no plan, and a real one of so many ops takes longer than it.
    plan = Plan(trace.fingerprint, "floor/1", Budget(least * 3 // 2))
    run = Run(trace, SLOW, plan, Timeline(math.inf, 0.0, (), 0))
    began = time.perf_counter()
    assert distance(run).seconds is not None
    assert time.perf_counter() - began < 6
