"""What one iteration saves and the next one reads, in the order in which DCGAN is mostly written.

A generator's output is made before the discriminator's step, and goes backward after it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.ir.run import Run
from belady.ir.trace import Tier
from tests.support.models import Task
from tests.support.training import Training, at_tight_budget, differences

SAMPLES, DRAWN, WIDTH = 256, 8, 64
STEPS = range(9)


class Square(nn.Module):
    """Saves its input twice, for one op."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


def generator(between: Callable[[], nn.Module]) -> nn.Module:
    inner = nn.Sequential(nn.Linear(DRAWN, WIDTH), between(), nn.Linear(WIDTH, WIDTH), between())
    return nn.Sequential(inner, nn.Linear(WIDTH, DRAWN))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(DRAWN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def noise(size: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(2, size, DRAWN, generator=source)
    return drawn[0], drawn[1]


def made_before(training: Training, index: int) -> list[Tensor]:
    """Two iterations: the first one makes what the second one takes backward."""
    (maker, judge), (maker_optimizer, judge_optimizer) = training.models, training.optimizers
    drawn, real = training.batch(index, SAMPLES)
    judge_optimizer.zero_grad(set_to_none=False)
    made = maker(drawn)
    lost = (judge(made.detach()) - judge(real)).mean()
    lost.backward()
    judge_optimizer.step()
    if index == 0:
        # The critic begins, so that its iterations have a plan when the generator's are measured.
        return [lost]
    maker_optimizer.zero_grad(set_to_none=False)
    gained = -judge(made).mean()
    gained.backward()
    maker_optimizer.step()
    return [lost, gained]


def begun(task: Task) -> Training:
    """With gradients from the start, so that the first iterations are of the same kinds."""
    training = Training(task)
    for model in training.models:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    return training


@pytest.mark.parametrize("policy", ["auto", "floor"])
@pytest.mark.parametrize("between", [nn.ReLU, Square])
def test_what_is_read_an_iteration_later_keeps_to_the_smallest_budget(
    between: Callable[[], nn.Module], policy: str
) -> None:
    task = Task("made before", lambda: [generator(between), critic()], noise)

    def train(budget: int) -> tuple[Training, Run | None, bool | None]:
        training = begun(task)
        with belady.virtualize(training.models, budget, policy=policy, exact=True) as vm:
            training.run(made_before, STEPS)
            return training, vm.run(), vm.verified

    trained, run, kept = at_tight_budget(train)
    assert differences(begun(task).run(made_before, STEPS).outcome(), trained.outcome()) == []
    assert kept
    assert run is not None
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) <= run.plan.predicted_peak_bytes
