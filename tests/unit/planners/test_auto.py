"""The default policy chooses among the others."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest

from belady import planners
from belady.errors import InfeasibleBudgetError
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.planners import POLICIES, plan, smallest_budget
from belady.planners.floor import FLOOR, Floor
from belady.planners.vdnn_layers import Kind, kind_of
from tests.unit.planners.nets import MIB, VGG, gpu, net

PLENTY = Budget(1 << 40)


def test_nothing_when_everything_fits() -> None:
    trace = net(VGG, workspace_bytes=MIB)
    # Even though the fastest algorithms would be faster than those observed.
    trace = replace(trace, ops=tuple(replace(op, device_seconds=1e-3) for op in trace.ops))
    made = plan("auto", trace, gpu(), Budget(smallest_budget("baseline", trace, gpu(), PLENTY)))
    assert made.planner == "auto:baseline/1"
    assert made.moves_nothing
    assert made.numerics == ()
    assert {a.reason for a in made.assignments} == {"kept: everything fits in device memory"}


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_a_plan_is_made(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, resting = net(VGG), []

    class Resting(Floor):
        def __call__(self, *args: Any, **kwargs: Any) -> Plan:
            resting.append(not gc.isenabled())
            return FLOOR(*args, **kwargs)

    monkeypatch.setattr(planners, "POLICIES", {"resting": Resting()})
    try:
        gc.enable() if enabled else gc.disable()
        plan("resting", trace, gpu(), PLENTY)
        with pytest.raises(InfeasibleBudgetError):
            plan("resting", trace, gpu(), Budget(1))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert resting == [True, True]


@pytest.mark.parametrize("link_rate", [1e9, 5e10, 1e13])
def test_the_fastest_that_fits(link_rate: float) -> None:
    trace, hardware = net(VGG), gpu(link_rate=link_rate)
    smallest, largest = (
        smallest_budget(policy, trace, hardware, PLENTY) for policy in ("auto", "baseline")
    )
    for device_bytes in range(smallest, largest, MIB // 2):
        budget = Budget(device_bytes)
        made = plan("auto", trace, hardware, budget)
        others = {}
        for policy in ("vdnn_conv", "vdnn_all", "vdnn_dyn", "hybrid"):
            try:
                alone = plan(policy, trace, hardware, budget)
            except InfeasibleBudgetError:
                continue
            others[f"auto:{alone.planner}"] = alone
        assert made.predicted_seconds == min(it.predicted_seconds for it in others.values())
        assert made.decisions == others[made.planner].decisions
        assert made.assignments == others[made.planner].assignments


def test_one_whose_blocks_do_not_fit_counts_as_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, hardware = net(VGG), gpu()
    smallest, largest = (
        smallest_budget(policy, trace, hardware, PLENTY) for policy in ("auto", "baseline")
    )
    budget = Budget((smallest + largest) // 2)
    fastest = plan("auto", trace, hardware, budget)

    def lacking(_: Trace, made: Plan, __: object) -> float:
        return 9.0 if f"auto:{made.planner}" == fastest.planner else -0.5

    monkeypatch.setattr("belady.planners.auto.excess", lacking)
    other = plan("auto", trace, hardware, budget)
    assert other.planner != fastest.planner
    assert other.predicted_seconds >= fastest.predicted_seconds


def test_numerics_change_only_where_that_gains_something() -> None:
    trace = net(VGG, workspace_bytes=2 * MIB)
    smallest, largest = (
        smallest_budget(policy, trace, gpu(), PLENTY) for policy in ("auto", "baseline")
    )
    changed = 0
    for device_bytes in range(smallest, largest, MIB // 4):
        budget = Budget(device_bytes)
        made = plan("auto", trace, gpu(), budget)
        # The algorithms observed are the fastest: to ask for those gains nothing.
        assert made.numerics in ((), ("workspace=memory",))
        if made.numerics:
            changed += 1
            assert made.predicted_seconds < seconds_if_exact(trace, budget)
    assert changed


def seconds_if_exact(trace: Trace, budget: Budget) -> float:
    try:
        return plan("auto", trace, gpu(), budget, exact=True).predicted_seconds
    except InfeasibleBudgetError:
        return float("inf")


def test_infeasible_only_if_no_policy_fits() -> None:
    trace = net(VGG)
    least = min(smallest_budget(p, trace, gpu(), PLENTY) for p in POLICIES if p != "auto")
    with pytest.raises(InfeasibleBudgetError, match=f"policy is {least} bytes") as refused:
        plan("auto", trace, gpu(), Budget(least - 1))
    assert refused.value.op
    assert refused.value.module.startswith("layer")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten.convolution.default", Kind.CONV),
        ("aten.cudnn_convolution_relu.default", Kind.CONV),
        ("aten::_convolution", Kind.CONV),
        ("aten.conv2d.default", Kind.CONV),
        ("aten.relu_.default", Kind.ACTV),
        ("aten._prelu_kernel.default", Kind.ACTV),
        ("aten.hardtanh.default", Kind.ACTV),
        ("aten._adaptive_avg_pool2d.default", Kind.POOL),
        ("aten.bmm.default", Kind.FC),
        ("aten.native_layer_norm.default", Kind.OTHER),
        ("aten.cat.default", Kind.OTHER),
    ],
)
def test_layer_kinds(name: str, kind: Kind) -> None:
    assert kind_of(replace(net("conv fc").ops[0], name=name)) is kind
