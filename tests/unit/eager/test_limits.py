"""Budgets that are refused before anything runs: what margin they are judged with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import belady
from belady.eager.limits import refuse_infeasible
from belady.errors import InfeasibleBudgetError, SpillError
from belady.ir.hardware import Allocator
from belady.ir.plan import Budget
from belady.measure.held import with_state
from belady.measure.margins import with_settled
from belady.measure.stages import Policy
from belady.measure.static import static_trace
from belady.planners import smallest_budget
from belady.units import format_bytes
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
    with pytest.raises(InfeasibleBudgetError) as caught:
        refuse_infeasible(trace, MACHINE, Policy("auto", Budget(less // 2)))
    # The budget named has room for them, and the error says what is needed without.
    assert caught.value.smallest_bytes > less
    (note,) = caught.value.__notes__
    assert note.endswith(f"without any {format_bytes(less)} do")


@pytest.mark.parametrize("settled", [0, 10, 1000, 10**12])
@pytest.mark.parametrize("fraction", [0.0, 0.18, 3.0])
def test_the_largest_peak_of_a_budget_is_just_within_it(settled: int, fraction: float) -> None:
    allocator = Allocator(1, fraction, 64, settled)
    for budget in (100, 12345, 10**9, 10**12 + 7):
        peak = allocator.peak_within(budget)
        assert allocator.budget_for(peak) <= budget < allocator.budget_for(peak + 1)
        assert allocator.budget_for(peak) >= peak + 64


@pytest.mark.parametrize("given", [None, 5, "net", [None]], ids=repr)
def test_what_is_no_model_is_named(given: Any) -> None:
    with pytest.raises(TypeError, match=r"models must be torch\.nn\.Module, not "):
        belady.virtualize(given, "1GiB")


def test_options_of_another_type_are_named() -> None:
    model: Any = nn.Linear(2, 2)
    wrong: Any = 5
    with pytest.raises(TypeError, match="spill_dir must be the path of a folder, not int"):
        belady.virtualize(model, "1GiB", spill_dir=wrong)
    wrong = ["auto"]
    with pytest.raises(ValueError, match=r"unknown policy \['auto'\]: one of "):
        belady.virtualize(model, "1GiB", policy=wrong)


def test_nothing_is_added_to_what_is_closed() -> None:
    with belady.virtualize(nn.Linear(2, 2), "1GiB") as vm:
        pass
    late = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="this VirtualMemory is closed: make another one"):
        vm.add(late)
    assert not late._forward_pre_hooks


def test_a_folder_in_which_no_file_can_be_made_is_refused() -> None:
    model = nn.Linear(2, 2)
    with belady.virtualize(model, "1GiB", spill_dir="/proc") as _, pytest.raises(SpillError):
        model(torch.randn(2, 2))
