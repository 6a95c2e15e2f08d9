"""Layers in the coordinated order, through `belady.virtualize`: less memory, every bit the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.errors import InfeasibleBudgetError, OrderError
from belady.ir.run import Run
from belady.ir.trace import Tier
from belady.sections import cutting, searching
from tests.support import training as steps
from tests.support.models import CNN, GAN, GPT, REPLAYED, TIED, Task
from tests.support.training import (
    Step,
    Training,
    at_tight_budget,
    differences,
    footprint,
    plain,
)

ITERATIONS = range(6)
ORDERED = "take the gradients of their parameters first"


class Decoder(nn.Module):
    """What its last convolution reads is wide, and nobody else saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256))
        self.picture = nn.Sequential(
            nn.Conv2d(4, 16, 3, padding=1),
            nn.GELU(),
            nn.Upsample(scale_factor=8),
            nn.Conv2d(16, 3, 3, padding=1),
            nn.AvgPool2d(8),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.picture(self.code(x).unflatten(1, (4, 8, 8))).flatten(1)


def codes(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (size,), generator=generator)
    return torch.randn(size, 32, generator=generator), labels


DECODER = Task("decoder", lambda: [Decoder()], codes)


def activated(*layers: nn.Module) -> Callable[[], list[nn.Module]]:
    """A network of layers with a ReLU behind each but the last."""

    def make() -> list[nn.Module]:
        # Not the same modules again for who is compared.
        own = [copy.deepcopy(layer) for layer in layers]
        for layer in own:
            layer.reset_parameters()
        relus = [it for layer in own[:-1] for it in (layer, nn.ReLU(inplace=True))]
        return [nn.Sequential(*relus, own[-1])]

    return make


def pictures(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (size, 16, 16), generator=generator)
    return torch.randn(size, 3, 16, 16, generator=generator), labels


def vectors(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (size,), generator=generator)
    return torch.randn(32 * size, 32, generator=generator), labels.repeat(32)


WIDE = [nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)]
RELUS = {
    "convolutions": Task(
        "convolutions",
        activated(nn.Conv2d(3, 16, 3, padding=1), *WIDE, nn.Conv2d(16, 10, 1)),
        pictures,
    ),
    "perceptron": Task(
        "perceptron",
        activated(nn.Linear(32, 128), nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 10)),
        vectors,
    ),
    "residual": CNN,
}


@functools.cache
def needed(policy: str, exact: bool = False, task: Task = DECODER) -> int:
    """Smallest budget that a refusal names."""
    training = Training(task)
    vm = belady.virtualize(training.models, 1 << 16, policy=policy, exact=exact)
    with vm, pytest.raises(InfeasibleBudgetError) as caught:
        training.loss(0)
    return caught.value.smallest_bytes


@pytest.fixture(scope="module")
def between() -> int:
    """A budget that suffices in order, and not as the model was made."""
    floor, ordered = needed("layrub_inter"), needed("layrub_hybrid")
    assert ordered < 0.9 * floor
    return (floor + ordered) // 2


def trained(
    budget: int, policy: str, exact: bool = False, task: Task = DECODER
) -> tuple[Training, Run, str]:
    training = Training(task)
    with belady.virtualize(training.models, budget, policy=policy, exact=exact) as vm:
        training.run(plain, ITERATIONS)
        run, report = vm.run(), vm.report()
    assert (vm.run(), vm.report()) == (run, report)
    assert run is not None
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) <= budget
    if not run.predicted.replay_seconds:  # comparing replays takes bytes of its own
        assert run.measured.peak(Tier.DEVICE) == run.predicted.peak(Tier.DEVICE)
    assert run.measured.defaults == ()
    assert differences(Training(task).run(plain, ITERATIONS).outcome(), training.outcome()) == []
    return training, run, report


@pytest.mark.parametrize("exact", [False, True])
def test_auto_orders_before_it_cuts(between: int, exact: bool) -> None:
    training, run, report = trained(between, "auto", exact)
    assert ORDERED in report
    assert run.plan.numerics == ()
    assert not any("forward" in vars(module) for module in training.model.modules())


@pytest.mark.parametrize(("share", "cut"), [(0.0, False), (1.0, True)])
def test_auto_cuts_where_the_order_leaves_no_room_for_workspaces(
    between: int, share: float, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A library that does not get its workspace takes another algorithm, many times slower.
    monkeypatch.setattr(searching, "workspace_share", lambda *_: share)
    training, expected = Training(DECODER), Training(DECODER).run(plain, ITERATIONS)
    with belady.virtualize(training.models, between) as vm:
        training.run(plain, ITERATIONS)
        report = vm.report()
        run = vm.run()
    assert ("slices along the batch" in report) is cut
    assert (ORDERED in report) is not cut
    assert run is not None
    # Slices without room for workspaces would do with the whole budget.
    assert not cut or run.predicted.peak(Tier.DEVICE) < 0.9 * between
    for one, two in zip(training.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two)


def test_the_order_stays_where_nothing_can_be_cut_for_workspaces(
    between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 2.0)
    monkeypatch.setattr(cutting.Cutting, "cut_for_workspaces", lambda *_: False)
    training, _, report = trained(between, "auto")
    assert ORDERED in report
    assert not any("forward" in vars(module) for module in training.model.modules())


def test_auto_leaves_the_order_alone_when_it_need_not() -> None:
    _, _, report = trained(1 << 30, "auto")
    assert ORDERED not in report


def test_hybrid_both_moves_and_orders(between: int) -> None:
    _, run, report = trained(between, "layrub_hybrid")
    assert ORDERED in report
    assert run.plan.planner == "layrub_hybrid/1"
    assert not run.plan.moves_nothing


def test_intra_needs_less_than_keeping_everything() -> None:
    budget = needed("layrub_intra")
    assert budget < needed("baseline")
    _, run, report = trained(int(1.1 * budget), "layrub_intra")
    assert ORDERED in report
    assert run.plan.moves_nothing


@pytest.mark.parametrize("name", RELUS)
def test_the_gradient_takes_the_place_of_what_a_relu_gave(name: str) -> None:
    task = RELUS[name]
    assert needed("layrub_intra", task=task) < needed("baseline", task=task)
    assert needed("layrub_hybrid", task=task) < needed("layrub_inter", task=task)


@pytest.mark.parametrize("name", ["convolutions", "perceptron"])
def test_a_relu_costs_a_byte_an_element(name: str) -> None:
    task = RELUS[name]
    # 8 times 16 channels of 16 x 16, or 256 rows of 128, in float32.
    wide = 128 << 10
    for plainly, in_order in (("baseline", "layrub_intra"), ("floor", "auto")):
        # Where bits may differ, slices do with less.
        exact = in_order == "auto"
        gain = needed(plainly, task=task) - needed(in_order, exact, task)
        assert gain == wide - wide // 4


def test_inter_moves_in_the_order_of_plain_pytorch() -> None:
    _, run, report = trained(int(1.2 * needed("layrub_inter")), "layrub_inter")
    assert ORDERED not in report
    assert not run.plan.moves_nothing


def test_the_smallest_budget_that_auto_names_counts_on_the_order() -> None:
    budget = needed("auto", exact=True)
    assert budget < 0.9 * needed("floor")
    trained(budget, "auto")


def test_auto_lets_relus_go_by_their_signs_where_it_must() -> None:
    task = RELUS["convolutions"]
    _, run, report = trained(needed("auto", True, task), "auto", exact=True, task=task)
    assert ORDERED in report
    assert run.plan.numerics == ()


HABITS: dict[str, tuple[Task, Step]] = {
    "tied weights": (TIED, plain),
    "checkpointing": (REPLAYED, plain),
    "two models": (GAN, steps.adversarial),
    "mixed precision": (GPT, steps.autocast),
    "two backwards": (CNN, steps.twice_backward),
    **{name: (task, plain) for name, task in RELUS.items()},
    "signs in mixed precision": (CNN, steps.autocast),
    "signs in two backwards": (RELUS["convolutions"], steps.twice_backward),
}


@pytest.mark.parametrize("policy", ["layrub_intra", "layrub_hybrid"])
@pytest.mark.parametrize("habit", HABITS)
def test_no_network_and_no_habit_changes_a_bit(habit: str, policy: str) -> None:
    task, step = HABITS[habit]

    def train(budget: int) -> tuple[Training, Run | None]:
        training = Training(task)
        with belady.virtualize(training.models, budget, policy=policy) as vm:
            return training.run(step, range(5)), vm.run()

    training, run = at_tight_budget(train)
    assert differences(Training(task).run(step, range(5)).outcome(), training.outcome()) == []
    assert run is not None
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) == run.plan.predicted_peak_bytes
    assert run.measured.defaults == ()


@pytest.mark.parametrize("policy", ["floor", "layrub_inter", "baseline"])
def test_nobody_else_orders(policy: str, between: int) -> None:
    training = Training(DECODER)
    vm = belady.virtualize(training.models, between, policy=policy)
    with vm, pytest.raises(InfeasibleBudgetError):
        training.loss(0)


def test_afterwards_everything_is_as_it_was(between: int) -> None:
    training = Training(DECODER).run(plain, range(1))
    before = footprint(training.model.modules()), list(training.model.state_dict())
    with belady.virtualize(training.models, between):
        training.run(plain, range(3))
        assert list(training.model.state_dict()) == before[1]
        assert "forward" in vars(training.model.code[0])
    assert (footprint(training.model.modules()), list(training.model.state_dict())) == before


def test_a_refused_budget_leaves_layers_as_they_were_made() -> None:
    training = Training(DECODER)
    with belady.virtualize(training.models, 1 << 19, exact=True):
        with pytest.raises(InfeasibleBudgetError):
            training.loss(0)
        assert not any("forward" in vars(module) for module in training.model.modules())


def test_a_larger_batch_that_needs_slices_gets_them(between: int) -> None:
    training, expected = Training(DECODER), Training(DECODER)
    with belady.virtualize(training.models, between) as vm:
        for size in (8, 8, 8, 8, 24, 24, 24, 24, 8, 8, 24, 24):
            for each in (training, expected):
                loss = each.loss(0, size)
                loss.backward()
                each.optimizer.step()
                each.optimizer.zero_grad()
                each.losses.append(loss.detach())
        report = vm.report()
    assert "slices along the batch" in report
    assert ORDERED not in report
    for one, two in zip(training.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two)


def test_a_larger_batch_that_is_refused_leaves_the_order_in_force(between: int) -> None:
    training = Training(DECODER)
    with belady.virtualize(training.models, between, exact=True):
        training.run(plain, range(1))
        with pytest.raises(InfeasibleBudgetError):
            training.loss(0, 64)
        assert "forward" in vars(training.model.code[0])
        training.run(plain, range(1, 5))
    expected = Training(DECODER).run(plain, range(5))
    assert differences(expected.outcome(), training.outcome()) == []


def test_a_gradient_of_a_gradient_says_what_to_do(between: int) -> None:
    training = Training(DECODER)
    with belady.virtualize(training.models, between, policy="layrub_hybrid"):
        loss = training.loss(0)
        with pytest.raises(OrderError, match="another policy"):
            torch.autograd.grad(loss, list(training.model.parameters()), create_graph=True)
        del loss
        training.run(plain, range(1))
