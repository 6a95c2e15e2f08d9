"""A user's modes see a captured graph while it is captured, and not again when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import belady
from tests.support.training import repeatable


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


class Doubling(TorchFunctionMode):
    """What these functions give is doubled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.relu, torch.sigmoid, torch.add) else result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.layer(x))
        return torch.add(torch.relu(x - 0.5), x)


def trained(*, managed: bool, doubled: bool = True) -> tuple[list[Tensor], str]:
    """Results and gradients, and what is reported."""
    torch.manual_seed(0)
    model, found, said = Model(), [], ""
    with belady.virtualize(model, "1GiB", engine="graph") if managed else nullcontext() as vm:
        for _ in range(4):
            with Doubling() if doubled else nullcontext():
                result = model(torch.ones(2, 8))
            result.sum().backward()
            assert model.layer.weight.grad is not None
            found += [result.detach(), model.layer.weight.grad.clone()]
        said = "" if vm is None else vm.report()
    return found, said


def test_a_mode_is_not_applied_twice() -> None:
    expected, _ = trained(managed=False)
    found, said = trained(managed=True)
    assert "not captured" not in said
    assert all(map(torch.equal, expected, found))
    undoubled, _ = trained(managed=False, doubled=False)
    assert not torch.equal(expected[0], undoubled[0])
