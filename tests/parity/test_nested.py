"""Batches of sequences of several lengths, as nested tensors: nothing of them is moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import belady

ROOM = 1 << 30
WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def losses(layout: torch.layout, policy: str | None) -> Tensor:
    torch.manual_seed(0)
    model, found = Net(), []
    vm = None if policy is None else belady.virtualize(model, ROOM, policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        batch = torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in (2, 5)], layout=layout)
        loss = model(batch).to_padded_tensor(0.0).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    if vm is not None:
        vm.close()
    return torch.stack(found)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("policy", ["floor", "hybrid"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_batches_give_the_losses_of_plain_pytorch(layout: torch.layout, policy: str) -> None:
    assert torch.equal(losses(layout, policy), losses(layout, None))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_program_that_begins_to_nest_goes_on() -> None:
    model = Net()
    with belady.virtualize(model, ROOM, policy="floor"):
        for index in range(7):
            rows = torch.randn(7, WIDTH)
            batch = rows if index < 5 else torch.nested.nested_tensor([rows[:2], rows[2:]])
            out = model(batch)
            loss = (out if index < 5 else out.to_padded_tensor(0.0)).square().sum()
            (plain,) = torch.autograd.grad(loss, [model.last.weight], retain_graph=True)
            loss.backward()
            assert model.last.weight.grad is not None
            assert torch.equal(model.last.weight.grad, plain)
            model.zero_grad()
