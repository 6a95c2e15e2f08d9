"""Budgets that are refused before anything runs: what margin they are judged with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from belady.eager.limits import refuse_infeasible
from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import Allocator
from belady.ir.plan import Budget
from belady.measure.held import with_state
from belady.measure.margins import with_settled
from belady.measure.stages import Policy
from belady.measure.static import static_trace
from belady.planners import smallest_budget
from tests.unit.simulate.cases import cpu

MACHINE = replace(cpu(), allocator=Allocator(64, 0.5, 0))


def test_no_margin_on_parameters_is_asked_for_but_by_the_founders_policies() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    call = ((torch.randn(4, 256),), {})
    trace = with_state(static_trace(model, call, torch.device("cpu")), 2)
    settled = with_settled(trace, MACHINE, "auto")
    # Parameters and two copies of them, and nothing of what comes and goes.
    kept = 3 * sum(it.untyped_storage().nbytes() for it in model.parameters())
    assert settled.allocator == replace(MACHINE.allocator, settled_bytes=kept)
    assert with_settled(trace, MACHINE, "floor") == MACHINE
    assert smallest_budget("auto", trace, settled, Budget(0)) < 0.8 * (
        smallest_budget("floor", trace, MACHINE, Budget(0))
    )
    # Whether there will be copies is not known.
    trace = static_trace(model, call, torch.device("cpu"))
    less = smallest_budget("auto", trace, with_settled(trace, MACHINE, "auto"), Budget(0))
    refuse_infeasible(trace, MACHINE, Policy("auto", Budget(less)))
    with pytest.raises(InfeasibleBudgetError):
        refuse_infeasible(trace, MACHINE, Policy("auto", Budget(less // 2)))


@pytest.mark.parametrize("settled", [0, 10, 1000, 10**12])
@pytest.mark.parametrize("fraction", [0.0, 0.18, 3.0])
def test_the_largest_peak_of_a_budget_is_just_within_it(settled: int, fraction: float) -> None:
    allocator = Allocator(1, fraction, 64, settled)
    for budget in (100, 12345, 10**9, 10**12 + 7):
        peak = allocator.peak_within(budget)
        assert allocator.budget_for(peak) <= budget < allocator.budget_for(peak + 1)
        assert allocator.budget_for(peak) >= peak + 64
