"""Attention of which one op is over the budget trains in slices, as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.errors import InfeasibleBudgetError
from belady.ir.trace import Tier
from tests.support import training as steps
from tests.support.models import CLASSES, Task
from tests.support.training import Step, Training, plain
from tests.unit.sections.attentions import (
    LENGTH,
    WIDTH,
    Biased,
    Layer,
    OneOp,
    Permuted,
    Rotary,
    Split,
)
from tests.unit.sections.test_given import Calling

ITERATIONS = range(6)


class Reader(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = Layer(attention())
        self.head = nn.Linear(WIDTH, CLASSES)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


def task(attention: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Task:
    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, LENGTH, WIDTH, generator=generator, dtype=dtype)
        return x, torch.randint(0, CLASSES, (size,), generator=generator)

    return Task("attention", lambda: [Reader(attention, dtype)], batch)


def smallest(of: Task, step: Step = plain) -> int:
    training = Training(of)
    vm = belady.virtualize(training.models, 1 << 10, policy="floor")
    with vm, pytest.raises(InfeasibleBudgetError) as caught:
        step(training, 0)
    return caught.value.smallest_bytes


def trained(of: Task, share: float, step: Step = plain) -> tuple[Training, Training]:
    """In slices within a share of what the floor needs, and plainly."""
    budget = int(share * smallest(of, step))
    training = Training(of)
    with belady.virtualize(training.models, budget) as vm:
        training.run(step, ITERATIONS)
        run = vm.run()
        assert "slices along the batch" in vm.report()
    assert run is not None
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) <= budget
    assert run.plan.numerics == ("sections",)
    return training, Training(of).run(step, ITERATIONS)


def gradients(training: Training) -> dict[str, Tensor]:
    loss = training.loss(99)
    loss.backward()
    return {name: it.grad for name, it in training.model.named_parameters() if it.grad is not None}


@pytest.mark.parametrize(
    "attention", [Permuted, Rotary, Biased, OneOp, partial(Calling, "shared")], ids=str
)
def test_attention_over_the_budget_trains_in_slices(attention: Callable[[], nn.Module]) -> None:
    training, expected = trained(task(attention), 0.7)
    for one, two in zip(training.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=0.0)


def test_gradients_are_those_of_the_whole_batch() -> None:
    of = task(Permuted)
    budget = int(0.6 * smallest(of))
    training, expected = Training(of), Training(of)
    with belady.virtualize(training.models, budget) as vm:
        for _ in range(3):
            training.optimizer.zero_grad()
            found = gradients(training)
        assert "slices along the batch" in vm.report()
    for name, gradient in gradients(expected).items():
        assert (found[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max()


@pytest.mark.parametrize(
    "step", [steps.accumulating, steps.short_at_the_end], ids=lambda step: step.__name__
)
def test_habits_of_training_give_the_numbers_of_the_whole_batch(step: Step) -> None:
    training, expected = trained(task(Split), 0.7, step)
    for name, tensor in expected.outcome().items():
        torch.testing.assert_close(training.outcome()[name], tensor, rtol=1e-9, atol=1e-12)


def test_autocast_stays_within_rounding() -> None:
    training, expected = trained(task(Split, torch.float32), 0.85, steps.autocast)
    for one, two in zip(training.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=0.0)


def test_dropout_of_what_is_seen_is_that_of_the_whole_batch() -> None:
    training, expected = trained(task(partial(Split, 0.2)), 0.75)
    for one, two in zip(training.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=0.0)


def test_dropout_inside_of_the_op_is_refused_with_its_reason() -> None:
    of = task(partial(OneOp, 0.2))
    training = Training(of)
    vm = belady.virtualize(training.models, int(0.6 * smallest(of)))
    with vm, pytest.raises(InfeasibleBudgetError) as caught:
        training.loss(0)
    assert any("draws random numbers" in note for note in caught.value.__notes__)
