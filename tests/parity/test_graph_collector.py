"""Python's collector comes seldom while a captured graph runs, and as often as before otherwise."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import belady
from tests.support.collector import thresholds

SEEN: list[int] = []


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    SEEN.clear()
    with thresholds(700, 10, 10):
        yield
    torch._dynamo.reset()


@torch.library.custom_op("belady_tests::looking", mutates_args=())
def looking(x: Tensor) -> Tensor:
    """Give a tensor on, and note how often the collector comes meanwhile."""
    SEEN.append(gc.get_threshold()[0])
    return x.clone()


@looking.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


looking.register_autograd(lambda ctx, gradient: looking(gradient))


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = looking(self.layer(x))
        return found


def test_it_comes_seldom_in_forward_and_backward() -> None:
    before, model = gc.get_threshold(), Looking()
    with belady.virtualize(model, "1GiB", engine="graph") as vm:
        for _ in range(4):
            loss = model(torch.ones(2, 4)).sum()
            assert gc.get_threshold() == before
            loss.backward()
            assert gc.get_threshold() == before
        assert "not captured" not in vm.report()
    assert len(SEEN) == 8
    assert min(SEEN) > 10 * before[0]
