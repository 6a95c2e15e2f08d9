"""One `VirtualMemory` manages a model at a time, whatever the engines."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import belady

ROOM = 1 << 30
ENGINES = ["eager", "graph", "auto"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def trained(model: nn.Module, vm: belady.VirtualMemory) -> None:
    for _ in range(6):
        model(torch.ones(2, 4)).sum().backward()
    assert vm.run() is not None


@pytest.mark.parametrize("second", ENGINES)
@pytest.mark.parametrize("first", ENGINES)
@pytest.mark.parametrize("called", [False, True])
def test_a_second_one_is_refused_and_leaves_the_first_alone(
    first: str, second: str, called: bool
) -> None:
    model = layers()
    with belady.virtualize(model, ROOM, policy="floor", engine=first) as vm:
        if called:
            trained(model, vm)
        with pytest.raises(ValueError, match="another VirtualMemory manages this Sequential"):
            belady.virtualize(model, ROOM, policy="floor", engine=second)
        with (
            belady.virtualize([], ROOM, engine=second) as other,
            pytest.raises(ValueError, match=r"close that one first \(vm.close\(\)"),
        ):
            other.add(model)
        trained(model, vm)
    assert "forward" not in vars(model)
    with belady.virtualize(model, ROOM, policy="floor", engine=second) as vm:
        trained(model, vm)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_that_was_dropped_is_in_nobodys_way(engine: str) -> None:
    model = layers()
    trained(model, belady.virtualize(model, ROOM, policy="floor", engine=engine))
    with belady.virtualize(model, ROOM, policy="floor", engine=engine) as vm:
        trained(model, vm)


def test_a_model_that_was_refused_is_nobodys() -> None:
    model = layers()
    model.forward = lambda x: x  # type: ignore[method-assign]
    with belady.virtualize([], ROOM, engine="graph") as vm:
        with pytest.raises(ValueError, match="was replaced"):
            vm.add(model)
        belady.virtualize(model, ROOM).close()


def test_a_copy_has_its_own() -> None:
    model = layers()
    with belady.virtualize(model, ROOM, policy="floor"):
        twin = copy.deepcopy(model)
        with belady.virtualize(twin, ROOM, policy="floor") as vm:
            trained(twin, vm)


def test_the_same_one_takes_a_model_twice() -> None:
    model = layers()
    with belady.virtualize([model, model], ROOM, policy="floor") as vm:
        vm.add(model)
        trained(model, vm)
