"""Forwards without a backward are planned around, and what is not planned is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.errors import InfeasibleBudgetError
from belady.ir.run import Run
from belady.ir.trace import Tier
from tests.support.training import repeatable

WIDTH = 64
ITERATIONS = 8

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

# Given the model, a batch, and a list that outlives the iteration.
Step = Callable[[nn.Module, Tensor, list[Tensor]], None]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


def inside(model: nn.Module, x: Tensor, kept: list[Tensor]) -> None:
    """What was thrown away is gone before backward."""
    other = model(x * 2)
    loss = model(x).square().sum()
    del other
    loss.backward()


def after(model: nn.Module, x: Tensor, kept: list[Tensor]) -> None:
    """It is there to the end."""
    other = model(x * 2)
    model(x).square().sum().backward()
    del other


def outliving(model: nn.Module, x: Tensor, kept: list[Tensor]) -> None:
    """It is there until the next iteration has made another."""
    kept[:] = [model(x * 2)]
    model(x).square().sum().backward()


def sharing(model: nn.Module, x: Tensor, kept: list[Tensor]) -> None:
    """Both forwards save what another call has made."""
    first = model(x)
    other = model(first)
    model(first).square().sum().backward()
    del other


def twice(model: nn.Module, x: Tensor, kept: list[Tensor]) -> None:
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [it for _ in range(4) for it in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def trained(step: Step, net: nn.Module) -> list[Tensor]:
    generator, kept, found = torch.Generator().manual_seed(1), list[Tensor](), list[Tensor]()
    for _ in range(ITERATIONS):
        step(net, torch.randn(WIDTH, WIDTH, generator=generator), kept)
        found += [it.grad for it in net.parameters() if it.grad is not None]
        net.zero_grad()
    return found


def within(step: Step, budget: int) -> tuple[Run | None, str]:
    net = model()
    with belady.virtualize(net, budget, policy="floor", engine="graph") as vm:
        found = trained(step, net)
        run, report = vm.run(), vm.report()
    expected = trained(step, model())
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    return run, report


def within_the_smallest(step: Step) -> tuple[Run | None, str]:
    budget = 1
    for _ in range(4):
        try:
            return within(step, budget)
        except InfeasibleBudgetError as error:
            budget = error.smallest_bytes
    raise AssertionError(f"{budget} bytes, the last figure named, were refused as well")


@pytest.mark.parametrize("step", [inside, after, outliving, sharing], ids=lambda it: it.__name__)
def test_an_iteration_with_a_forward_that_is_thrown_away_is_planned(step: Step) -> None:
    run, _ = within_the_smallest(step)
    assert run is not None
    assert run.plan.decisions
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) <= run.plan.predicted_peak_bytes
    thrown_away = 1 if step is sharing else 0
    passes = {
        save.pass_index for value in run.plan.decisions for save in run.trace.values[value].saves
    }
    assert passes
    assert thrown_away not in passes


def test_what_is_thrown_away_late_is_held_longer() -> None:
    peaks = []
    for step in (inside, after):
        run, _ = within(step, 1 << 30)
        assert run is not None
        peaks.append(run.plan.predicted_peak_bytes)
    assert peaks[0] < peaks[1]


def test_the_report_says_that_a_second_backward_is_not_planned() -> None:
    run, report = within(twice, 1 << 30)
    assert run is None
    assert "a second backward through the same call (retain_graph=True) is not planned" in report
    assert "other bytes" not in report


def test_two_iterations_that_errors_cut_short_are_no_habit() -> None:
    def step(model: nn.Module, x: Tensor, kept: list[Tensor]) -> None:
        kept.append(x)
        loss = model(x).square().sum()
        if len(kept) in (1, 3):
            # It is still there when the next begins, as what an exception's frames refer to.
            kept[0] = loss
            raise KeyError
        loss.backward()

    def forgiving(model: nn.Module, x: Tensor, kept: list[Tensor]) -> None:
        with suppress(KeyError):
            step(model, x, kept)

    def undisturbed(model: nn.Module, x: Tensor, kept: list[Tensor]) -> None:
        model(x).square().sum().backward()

    run, _ = within_the_smallest(undisturbed)
    assert run is not None
    run, _ = within(forgiving, run.plan.budget.device_bytes)
    assert run is not None
