"""Gradients that a graph puts elsewhere as soon as they are made: equal bits, and nothing kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import belady.graph.placing as placing
from belady.graph.orders import orders_of
from belady.graph.placing import Places
from belady.ir.trace import StorageKind
from tests.parity.graphs import PlannedHost, compiled
from tests.parity.racing import hostile_carrier, random_plan
from tests.support.models import CNN, GAN, GPT, TIED, Task
from tests.support.training import (
    Step,
    Training,
    accumulating,
    adversarial,
    autocast,
    differences,
    plain,
    twice_backward,
)


class Elsewhere:
    """Copies a gradient and spoils what it was made in, as another value there would."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []
        self.kept = 0

    def __call__(self, gradient: Tensor) -> Tensor:
        placed = gradient.clone(memory_format=torch.preserve_format)
        gradient.fill_(float("nan"))
        # Before the next one is made, nobody holds the one that was left.
        self.kept += sum(it() is not None for it in self.made)
        self.made.append(weakref.ref(gradient))
        return placed


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "LARGE_BYTES", 0)


def planned(task: Task, step: Step, count: int, place: Elsewhere) -> tuple[list[str], PlannedHost]:
    expected = Training(task, "cpu").run(step, range(count)).outcome()
    training, carrier = Training(task, "cpu"), hostile_carrier("threads")
    host = PlannedHost(
        training.models, carrier, lambda trace: random_plan(trace, "threads", 1), place
    )
    try:
        with compiled(training, host):
            training.run(step, range(count))
    finally:
        carrier.close()
    return differences(expected, training.outcome()), host


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("task", [CNN, GPT, TIED, GAN], ids=str)
def test_no_bit_changes(task: Task) -> None:
    place = Elsewhere()
    wrong, host = planned(task, adversarial if task is GAN else plain, 3, place)
    assert wrong == []
    assert place.made
    assert place.kept == 0
    assert host.reasons == []


@pytest.mark.parametrize(
    "step", [autocast, accumulating, twice_backward], ids=lambda step: step.__name__
)
def test_no_bit_changes_however_people_train(step: Step) -> None:
    place = Elsewhere()
    wrong, _ = planned(CNN, step, 3, place)
    assert wrong == []
    assert place.made


def test_each_large_gradient_of_a_parameter_is_placed_once() -> None:
    place = Elsewhere()
    _, host = planned(CNN, plain, 2, place)
    (drawn,) = host.drawn
    storages = drawn.trace.storages
    gradients = [it for it in storages if it.kind is StorageKind.GRADIENT]
    # A gradient that is a view of what else goes out stays; this model has none.
    assert len(place.made) == 2 * len(gradients)


def test_what_is_small_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sorted(
        parameter.nbytes
        for model in Training(CNN, "cpu").models
        for parameter in model.parameters()
    )
    monkeypatch.setattr(placing, "LARGE_BYTES", sizes[-2])
    place = Elsewhere()
    planned(CNN, plain, 1, place)
    assert len(place.made) == 1


def test_gradients_stay_unless_asked() -> None:
    _, host = planned(CNN, plain, 1, Elsewhere())
    (drawn,), (plan,) = host.drawn, host.plans
    assert all(not it.apart for it in orders_of(drawn, plan))
    assert any(it.apart for it in orders_of(drawn, plan, gradients_apart=True))


# -- the state of optimizers ----------------------------------------------------------------------


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[torch.optim.Optimizer]:
    found: list[torch.optim.Optimizer] = []

    def settle(optimizer: torch.optim.Optimizer, place: Callable[[Tensor], Tensor | None]) -> None:
        found.append(optimizer)

    monkeypatch.setattr(placing, "settle_state", settle)
    return found


def test_state_is_settled_once_for_each_optimizer_of_the_models(
    settled: list[torch.optim.Optimizer],
) -> None:
    ours, other = nn.Linear(4, 4), nn.Linear(4, 4)
    places = Places(torch.device("cpu"), [ours])
    mine, foreign = stepped(ours), stepped(other)
    for _ in range(2):
        places.stepped(mine)
        places.stepped(foreign)
    assert settled == [mine]
    places.close()
    places.stepped(stepped(ours))
    assert settled == [mine]


@pytest.mark.gpu
def test_on_a_gpu_optimizers_tell_while_it_lives(settled: list[torch.optim.Optimizer]) -> None:
    model = nn.Linear(4, 4)
    places = Places(torch.device("cuda"), [model])
    first = stepped(model)
    assert settled == [first]
    del places
    stepped(model)
    assert settled == [first]
