"""What forward computes by NumPy is NumPy's, also where the rest is captured."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import belady

WIDTH = 16
# As Dynamo looks at what is passed from one graph to the next.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.usefixtures("captures"),
]
Step = Callable[[Tensor], Tensor]


def noisy(h: Tensor) -> Tensor:
    """By the generator of all of NumPy."""
    return h + torch.from_numpy(np.random.randn(*h.shape).astype("float32"))  # noqa: NPY002


def scaled(h: Tensor) -> Tensor:
    """By sums, which NumPy adds up in another order."""
    numbers = np.exp(h.detach().numpy())
    return h * torch.from_numpy(numbers / numbers.sum())


class Net(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.step(torch.tanh(self.first(x))))


def trained(step: Step, engine: str = "") -> tuple[list[float], list[Tensor], float]:
    """Losses, parameters, and what NumPy draws next."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    model, losses = Net(step), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    vm = belady.virtualize(model, 1 << 30, engine=engine) if engine else None
    for _ in range(5):
        loss = model(torch.randn(64, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if vm is not None:
        vm.close()
    return losses, [it.detach() for it in model.parameters()], float(np.random.rand())  # noqa: NPY002


@pytest.mark.parametrize("engine", ["graph", "auto"])
@pytest.mark.parametrize("step", [noisy, scaled])
def test_numbers_are_those_of_numpy(step: Step, engine: str) -> None:
    losses, parameters, drawn = trained(step)
    same, others, after = trained(step, engine)
    assert (losses, drawn) == (same, after)
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
