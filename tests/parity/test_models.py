"""Training under a budget gives plain PyTorch's numbers, bit for bit, however people train."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.ir.run import Run
from belady.ir.trace import Tier
from belady.planners import traits_of
from tests.support import training as steps
from tests.support.models import CNN, GAN, GPT, LSTM, REENTRANT, REPLAYED, SINGLE, TASKS, Task
from tests.support.training import (
    Interruption,
    Step,
    Training,
    at_tight_budget,
    differences,
    footprint,
    plain,
)

# Two iterations are observed, a third settles, two are verified: a plan is carried out three times.
ITERATIONS = range(5)
POLICIES = ("auto", "hybrid", "floor", "vdnn_all", "vdnn_conv", "vdnn_dyn", "baseline")
ROOM = "1GiB"
# Policies that have something to move in each task at their smallest budget.
MOVING = ("auto", "hybrid", "floor")


def step_of(task: Task) -> Step:
    return steps.adversarial if task is GAN else plain


@functools.cache
def half_lstm() -> bool:
    """Whether an LSTM can run in bfloat16: oneDNN has none for processors without AVX-512."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(8, 8)(torch.zeros(1, 1, 8))
    except RuntimeError:
        return False
    return True


@functools.cache
def expected(task: Task, step: Step, device: str) -> dict[str, Tensor]:
    return Training(task, device).run(step, ITERATIONS).outcome()


def train(
    task: Task, step: Step, policy: str, budget: object, device: str, exact: bool = False
) -> Run:
    """Train, compare with plain PyTorch, and give what was planned."""
    training = Training(task, device)
    with belady.virtualize(training.models, budget, policy=policy, exact=exact) as vm:
        training.run(step, ITERATIONS)
        run = vm.run()
    assert differences(expected(task, step, device), training.outcome()) == []
    assert run is not None
    return run


def train_at_the_floor(task: Task, step: Step, device: str) -> Run:
    """Move all that may move: with room to spare, so that nothing is refused."""
    run = train(task, step, "floor", ROOM, device)
    assert run.plan.decisions
    return run


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("task", TASKS, ids=str)
def test_policy_changes_no_bit(task: Task, policy: str, device: str) -> None:
    step = step_of(task)
    # Where bits may differ, these name a budget in which slices do.
    exact = traits_of(policy).slices_modules
    run = at_tight_budget(lambda budget: train(task, step, policy, budget, device, exact), device)
    if exact:
        run = train(task, step, policy, run.plan.budget.device_bytes, device)
    if task is not GAN:
        # The adversaries' last step has nothing to gain at the smallest budget of the first.
        # On a GPU the budget has room to spare: who moves only what must move, moves nothing.
        spared = device == "cuda" and policy in ("auto", "hybrid")
        assert policy not in MOVING or run.plan.decisions or spared
    assert policy != "baseline" or not run.plan.decisions


class Telling(nn.Module):
    """Looks at what its layers make, as people who log statistics do."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 32, 32, 32, 32, 10)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(one, other), nn.LayerNorm(other), nn.GELU())
            for one, other in pairwise(widths)
        )
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            # Autograd saves it for this too, and lets go before the next layer saves it.
            self.seen.append(x.abs().mean().item())
        return x


@pytest.mark.parametrize("policy", [*POLICIES, "lifetime", "layrub_intra", "tvdnn_greedy"])
def test_what_is_saved_for_a_look_in_between_moves_when_it_is_saved_again(policy: str) -> None:
    def many(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = 64 * size, 32
        labels = torch.randint(10, shape[:1], generator=generator)
        return torch.randn(shape, generator=generator), labels

    task = Task("telling", lambda: [Telling()], many)
    run = at_tight_budget(lambda budget: train(task, plain, policy, budget, "cpu"))
    assert policy not in MOVING or run.plan.decisions


HABITS: tuple[Step, ...] = (
    steps.autocast,
    steps.accumulating,
    steps.zeroing_first,
    steps.clipping,
    steps.evaluating,
    steps.short_at_the_end,
    steps.twice_backward,
    steps.abandoning,
    steps.by_hand,
    steps.closing_over,
)


@pytest.mark.parametrize("step", HABITS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("task", [CNN, GPT, LSTM, REPLAYED], ids=str)
def test_habit_of_training_changes_no_bit(task: Task, step: Step, device: str) -> None:
    if task is LSTM and step is steps.autocast and device == "cpu" and not half_lstm():
        pytest.skip("plain PyTorch has no LSTM in bfloat16 for this processor")
    train_at_the_floor(task, step, device)


# Once while observed, once while planned; never first, where the interrupted forward would be
# the one that is only traced.
INTERRUPTED = (1, 3)


@pytest.mark.parametrize("layer", [1, 3, -1])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("task", [CNN, GPT, REENTRANT], ids=str)
def test_interrupted_forward_changes_no_bit(
    task: Task, error: type[BaseException], layer: int, device: str
) -> None:
    train_at_the_floor(task, Interruption(error, INTERRUPTED, layer), device)


@pytest.mark.parametrize("task", SINGLE, ids=str)
def test_measured_peak_is_the_planned_peak(task: Task) -> None:
    run = train_at_the_floor(task, plain, "cpu")
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) == run.plan.predicted_peak_bytes
    assert run.measured.defaults == ()


@pytest.mark.parametrize("policy", ["auto", "floor"])
@pytest.mark.parametrize("iterations", [0, 1, 2, 3, 5])
def test_close_leaves_everything_as_it_was(policy: str, iterations: int) -> None:
    training = Training(CNN).run(plain, range(1))
    modules = list(training.model.modules())
    before = footprint([*modules, training.optimizer])
    vm = belady.virtualize(training.model, ROOM, policy=policy)
    training.run(plain, range(iterations))
    vm.close()
    assert footprint([*modules, training.optimizer]) == before
    vm.close()


@pytest.mark.parametrize("iterations", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_close_after_an_interruption_leaves_everything_as_it_was(
    error: type[BaseException], iterations: int
) -> None:
    training = Training(CNN).run(plain, range(1))
    modules = list(training.model.modules())
    before = footprint([*modules, training.optimizer])
    with belady.virtualize(training.model, ROOM, policy="floor"):
        training.run(plain, range(iterations))
        with steps.raising(training.model, error, 3), pytest.raises(error):
            training.loss(0)
    assert footprint([*modules, training.optimizer]) == before
    assert training.run(plain, range(3)).losses


class Aliased(nn.Module):
    """Saves one storage through two tensors whose versions are counted apart, as cuDNN does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 1024), nn.Linear(1024, 10)
        self.one, self.two = nn.Parameter(torch.ones(1024)), nn.Parameter(torch.ones(1024))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        alias = x.data
        alias.mul_(0.5)
        return self.last(x * self.one + alias * self.two)


def rows(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (size,), generator=generator)
    return torch.randn(size, 64, generator=generator), labels


def test_versions_that_are_counted_apart_do_not_look_like_a_changing_program() -> None:
    run = train(Task("aliased", lambda: [Aliased()], rows), plain, "floor", ROOM, "cpu")
    assert run.measured is not None
    assert run.measured.defaults == ()


def test_backward_after_close_raises() -> None:
    training = Training(CNN)
    with belady.virtualize(training.model, ROOM, policy="floor"):
        loss = training.loss(0)
    # Its saved values went with the spill file.
    with pytest.raises(belady.BeladyError):
        loss.backward()
