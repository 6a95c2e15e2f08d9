"""Modules and batches that change while graphs run: hooks come and go, sizes are many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import belady
from tests.support.training import repeatable

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
FROM, TO, ITERATIONS = 3, 5, 7
# More than Dynamo captures by itself before it gives up.
SIZES = 12

Put = Callable[[nn.Module, list[Any]], RemovableHandle]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


def doubling(module: nn.Module, seen: list[Any]) -> RemovableHandle:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        seen.append("after")
        return output * 2

    return module.register_forward_hook(hook)


def halving(module: nn.Module, seen: list[Any]) -> RemovableHandle:
    def hook(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        seen.append("before")
        return (given[0] / 2,)

    return module.register_forward_pre_hook(hook)


def clipping(module: nn.Module, seen: list[Any]) -> RemovableHandle:
    def hook(_: nn.Module, inputs: Any, __: Any) -> Any:
        seen.append("backward")
        return tuple(None if it is None else it.clamp(-0.1, 0.1) for it in inputs)

    return module.register_full_backward_hook(hook)


def run(put: Put, engine: str | None) -> tuple[list[float], list[Any]]:
    """Losses and gradients with a hook that comes late and goes again, and what it has seen."""
    torch.manual_seed(0)
    model, seen, found = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), [], []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 8)
    vm = None if engine is None else belady.virtualize(model, "1GiB", engine=engine)
    handle = None
    for index in range(ITERATIONS):
        if index == FROM:
            handle = put(model[2], seen)
        if index == TO:
            assert handle is not None
            handle.remove()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if vm is not None:
        vm.close()
    return found, seen


@pytest.mark.parametrize("engine", ["graph", "auto"])
@pytest.mark.parametrize("put", [doubling, halving, clipping], ids=lambda it: it.__name__)
def test_a_hook_that_comes_late_is_called_until_it_goes(put: Put, engine: str) -> None:
    plainly, called = run(put, None)
    assert len(called) == TO - FROM
    assert run(put, engine) == (plainly, called)


@pytest.mark.parametrize("engine", ["graph", "auto"])
def test_an_error_of_a_hook_reaches_the_user(engine: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("the user's")

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].register_forward_hook(fail)
    with (
        belady.virtualize(model, "1GiB", engine=engine),
        pytest.raises(ValueError, match="the user's"),
    ):
        model(torch.randn(4, 8))


@pytest.mark.parametrize("engine", ["graph", "auto"])
def test_every_size_of_a_batch_is_captured(engine: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with belady.virtualize(model, "1GiB", engine=engine) as vm:
        for size in range(2, 2 + SIZES):
            model(torch.randn(size, 8)).sum().backward()
            session: Any = vm._tracker.conductor
            assert len(session._kinds) == size - 1
        assert not session.reasons
