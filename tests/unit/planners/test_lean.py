"""Iterations whose convolutions do with least workspace, planned by policies that know of none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.errors import InfeasibleBudgetError
from belady.ir.legality import check
from belady.ir.plan import Budget, Plan, Workspace
from belady.ir.trace import Algorithm, Trace
from belady.planners import POLICIES, plan, smallest_budget
from belady.planners.lean import Lean
from belady.planners.moves import Case
from belady.planners.workspace import LEAN, USUAL, as_run, fastest_that_fit
from belady.simulate import simulate
from tests.unit.planners.nets import MIB, VGG, gpu, net

PLENTY = Budget(1 << 40)
BASELINE, HYBRID, FLOOR = (POLICIES[name] for name in ("baseline", "hybrid", "floor"))


@pytest.fixture
def trace() -> Trace:
    return net(VGG, workspace_bytes=3 * MIB)


def with_seconds_of_lean(trace: Trace, share: float) -> Trace:
    """The same, with algorithms without workspace that take ``share`` of the usual seconds."""
    ops = list(trace.ops)
    for index, op in enumerate(ops):
        if op.algorithms:
            usual = Algorithm("usual", op.device_seconds, op.workspace_bytes)
            lean = Algorithm("lean", share * op.device_seconds, 0)
            both = sorted((usual, lean), key=lambda way: way.device_seconds)
            ops[index] = replace(op, algorithms=tuple(both))
    return replace(trace, ops=tuple(ops))


@pytest.mark.parametrize("policy", [BASELINE, HYBRID], ids=lambda policy: policy.name)
def test_a_lean_plan_is_as_predicted_for_the_trace_that_has_the_choice(
    trace: Trace, policy: Lean
) -> None:
    made = Lean(policy)(trace, gpu(), PLENTY)
    assert made.trace == trace.fingerprint
    assert made.workspace is Workspace.MEMORY
    assert made.numerics == ("workspace=memory",)
    convs = [i for i, op in enumerate(trace.ops) if op.algorithms]
    assert made.layer_algorithms == tuple((i, "lean") for i in convs)
    verdict = check(trace, gpu(), made, PLENTY)
    assert verdict.ok
    assert verdict.peak_bytes == made.predicted_peak_bytes
    assert simulate(trace, gpu(), made).seconds == pytest.approx(made.predicted_seconds)


def test_exact_or_without_a_choice_it_is_the_policy(trace: Trace) -> None:
    assert Lean(FLOOR)(trace, gpu(), PLENTY, exact=True) == FLOOR(trace, gpu(), PLENTY)
    assert Lean(FLOOR)(net(VGG), gpu(), PLENTY) == FLOOR(net(VGG), gpu(), PLENTY)


def test_convolutions_with_a_choice_are_not_recomputed(trace: Trace) -> None:
    replayable = tuple(replace(op, replayable=True) for op in trace.ops)
    trace = replace(trace, ops=replayable)
    least = smallest_budget("hybrid", net(VGG), gpu(), PLENTY)
    recomputed = set()
    for device_bytes in range(least, least + 4 * MIB, MIB):
        made = Lean(HYBRID)(trace, gpu(link_rate=1e8), Budget(device_bytes))
        for decision in made.decisions.values():
            recomputed |= set(getattr(decision, "ops", ()))
    assert recomputed
    assert not any(trace.ops[op].algorithms for op in recomputed)


def test_auto_keeps_everything_where_workspace_alone_is_over(trace: Trace) -> None:
    trace = with_seconds_of_lean(trace, 1.1)
    budget = Budget(smallest_budget("baseline", net(VGG), gpu(), PLENTY))
    made = plan("auto", trace, gpu(link_rate=1e8), budget)
    assert made.workspace is Workspace.MEMORY
    assert made.moves_nothing
    assert made.predicted_seconds < exactly(trace, budget, link_rate=1e8).predicted_seconds


def test_auto_lets_convolutions_be_where_lean_ones_are_too_slow(trace: Trace) -> None:
    trace = with_seconds_of_lean(trace, 1000.0)
    budget = Budget(smallest_budget("baseline", trace, gpu(), PLENTY) - MIB)
    made = plan("auto", trace, gpu(), budget)
    assert made.workspace is Workspace.UNCHANGED
    assert made == exactly(trace, budget)


def test_auto_asks_for_less_where_nothing_else_fits(trace: Trace) -> None:
    trace = with_seconds_of_lean(trace, 1000.0)
    budget = Budget(smallest_budget("auto", trace, gpu(), PLENTY))
    assert plan("auto", trace, gpu(), budget).workspace is Workspace.MEMORY
    with pytest.raises(InfeasibleBudgetError):
        exactly(trace, budget)


def test_what_is_fast_without_workspace_is_not_what_performance_runs(trace: Trace) -> None:
    made = plan("vdnn_all", with_seconds_of_lean(trace, 0.5), gpu(), PLENTY)
    assert made.workspace is Workspace.PERFORMANCE
    assert {name for _, name in made.layer_algorithms} == {"usual"}


def exactly(trace: Trace, budget: Budget, link_rate: float = 5e10) -> Plan:
    return plan("auto", trace, gpu(link_rate=link_rate), budget, exact=True)


# -- once it was seen what runs --------------------------------------------------------------------


def seen(trace: Trace, share: float, workspace_bytes: int) -> Trace:
    """The same, where all that has a choice was seen to run so when it was asked for less."""
    ops = list(trace.ops)
    for index, op in enumerate(ops):
        if op.algorithms:
            usual = Algorithm(USUAL, op.device_seconds, op.workspace_bytes)
            lean = Algorithm(LEAN, share * op.device_seconds, workspace_bytes)
            both = sorted((usual, lean), key=lambda way: way.device_seconds)
            ops[index] = replace(op, algorithms=tuple(both))
    return replace(trace, ops=tuple(ops))


def test_what_is_asked_for_is_what_runs_even_if_it_takes_more(trace: Trace) -> None:
    trace = seen(trace, 2.0, 4 * MIB)
    made = Lean(BASELINE)(trace, gpu(), PLENTY)
    assert {name for _, name in made.layer_algorithms} == {LEAN}
    least = BASELINE(trace, gpu(), PLENTY)
    assert made.predicted_peak_bytes > least.predicted_peak_bytes
    assert made.predicted_seconds > least.predicted_seconds


def test_performance_is_the_usual_way_also_where_the_other_takes_as_much(trace: Trace) -> None:
    made = plan("vdnn_all", seen(trace, 0.9, 3 * MIB), gpu(), PLENTY)
    assert made.workspace is Workspace.PERFORMANCE
    assert {name for _, name in made.layer_algorithms} == {USUAL}


def test_no_op_is_planned_with_less_than_it_then_takes(trace: Trace) -> None:
    trace = seen(trace, 2.0, 4 * MIB)
    case = Case(trace, gpu(), PLENTY)
    chosen = fastest_that_fit(case, [0] * len(trace.ops))
    assert chosen.workspace is Workspace.MEMORY
    assert {name for _, name in chosen.by_op} == {LEAN}
    # Where it takes less, each op has its fastest, as in the paper.
    chosen = fastest_that_fit(Case(seen(trace, 2.0, 0), gpu(), PLENTY), [0] * len(trace.ops))
    assert {name for _, name in chosen.by_op} == {USUAL}


def test_a_plan_names_what_runs_where_that_is_known(trace: Trace) -> None:
    known = seen(trace, 2.0, MIB)
    convs = [i for i, op in enumerate(trace.ops) if op.algorithms]
    made = replace(plan("floor", trace, gpu(), PLENTY), workspace=Workspace.MEMORY)
    single = replace(made, layer_algorithms=((convs[1], USUAL),))
    for mixed in (made, single):
        assert as_run(mixed, known).layer_algorithms == tuple((i, LEAN) for i in convs)
        assert check(known, gpu(), as_run(mixed, known), PLENTY).ok
    # What nobody has seen is left.
    assert as_run(single, net(VGG)) == single
    assert as_run(replace(single, workspace=Workspace.PERFORMANCE), known).layer_algorithms == (
        single.layer_algorithms
    )


def test_auto_compares_plans_as_they_run(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = with_seconds_of_lean(trace, 3.0)
    convs = [i for i, op in enumerate(slow.ops) if op.algorithms]
    kept = BASELINE(slow, gpu(), PLENTY)
    # As vDNN's ladder has it: one layer downgraded, and the setting for all.
    ladder = replace(
        kept,
        planner="ladder/1",
        workspace=Workspace.MEMORY,
        layer_algorithms=((convs[0], LEAN), *((i, USUAL) for i in convs[1:])),
    )
    ladder = replace(ladder, predicted_seconds=simulate(slow, gpu(), ladder).seconds)
    other = replace(kept, planner="other/1", predicted_seconds=1.01 * ladder.predicted_seconds)
    assert simulate(slow, gpu(), as_run(ladder, slow)).seconds > other.predicted_seconds

    def refuses(*_: object, **__: object) -> Plan:
        raise InfeasibleBudgetError(
            needed_bytes=2, budget_bytes=1, smallest_bytes=2, op="", module=""
        )

    made = {"_CANDIDATES": (lambda *_, **__: ladder, lambda *_, **__: other), "_LEAN": ()}
    for name, planners in {**made, "BASELINE": refuses}.items():
        monkeypatch.setattr(f"belady.planners.auto.{name}", planners)
    assert plan("auto", slow, gpu(), PLENTY).planner == "auto:other/1"
