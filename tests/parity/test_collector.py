"""Python's collector comes seldom in an iteration behind hooks, and else as often as before."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.errors import InfeasibleBudgetError
from tests.support.collector import thresholds
from tests.support.models import CNN
from tests.support.training import Training, footprint, plain

BEFORE = (700, 10, 10)
SELDOM = 100_000


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with thresholds(*BEFORE):
        yield


class Looking(nn.Module):
    """Notes how often the collector comes while it runs."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(4, 4), then
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(gc.get_threshold()[0])
        self.then()
        return torch.relu(self.layer(x))


def test_it_comes_seldom_from_forward_to_step() -> None:
    model = Looking()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with belady.virtualize(model, "1GiB"):
        for _ in range(8):
            model.seen.clear()
            loss = model(torch.ones(2, 4)).sum()
            assert model.seen[-1] == SELDOM
            loss.backward()
            assert gc.get_threshold()[0] == SELDOM
            optimizer.step()
            assert gc.get_threshold() == BEFORE


def test_it_never_finds_alive_what_waits_for_backward() -> None:
    """A collection in between would make it old, and in time bring one of all there is."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(160)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    came: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        came.append(about["generation"])

    with belady.virtualize(model, "1GiB", policy="floor") as vm:
        for _ in range(8):
            gc.callbacks.append(note)
            loss = model(torch.ones(64, 32)).sum()
            waiting = gc.get_count()[0]
            loss.backward()
            gc.callbacks.remove(note)
            optimizer.step()
            if not vm.verified:
                came.clear()
    assert vm.verified
    # Else the collector would have had no reason to come.
    assert waiting > 2 * BEFORE[0]
    assert came == []


@pytest.mark.parametrize("iterations", [0, 8])
def test_it_comes_as_before_once_all_is_lost(iterations: int) -> None:
    """Nobody has to end the last iteration, observed or planned, nor close what manages it."""
    model = Looking()
    vm = belady.virtualize(model, "1GiB")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(iterations):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    model(torch.ones(2, 4)).sum().backward()
    assert gc.get_threshold()[0] == SELDOM
    del vm, model
    gc.collect()
    assert gc.get_threshold() == BEFORE
    assert footprint([])["dispatch modes"] == footprint([])["function modes"] == 0


def test_also_where_a_block_is_an_iteration() -> None:
    model = Looking()
    with belady.virtualize(model, "1GiB") as vm:
        for _ in range(3):
            with vm.iteration():
                model(torch.ones(2, 4)).sum().backward()
            assert gc.get_threshold() == BEFORE
    assert model.seen[-1] == SELDOM


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_it_comes_as_before_after_a_forward_that_raised(error: type[BaseException]) -> None:
    def then() -> None:
        raise error

    model = Looking(then)
    with belady.virtualize(model, "1GiB"):
        for _ in range(2):
            with pytest.raises(error):
                model(torch.ones(2, 4))
            assert gc.get_threshold() == BEFORE


def test_it_comes_as_before_after_a_budget_was_refused() -> None:
    training = Training(CNN)
    with belady.virtualize(training.models, 1000), pytest.raises(InfeasibleBudgetError):
        training.run(plain, range(3))
    assert gc.get_threshold() == BEFORE


def test_where_it_was_switched_off_it_stays_off() -> None:
    gc.set_threshold(0)
    model = Looking()
    with belady.virtualize(model, "1GiB"):
        model(torch.ones(2, 4)).sum().backward()
    assert model.seen[-1] == gc.get_threshold()[0] == 0
