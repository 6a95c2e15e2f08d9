"""A place for what lasts that a CPU has too, and a model with something to put there."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 520  # a square of floats is more than 1 MiB
SQUARE = 4 * WIDTH**2
ROOM = 1 << 40


class Elsewhere:
    """Copies tensors and knows its copies."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._copies: list[weakref.ref[Tensor]] = []

    def __call__(self, tensor: Tensor) -> Tensor | None:
        copy = tensor.clone()
        self.sizes.append(tensor.nbytes)
        self._copies.append(weakref.ref(copy))
        return copy

    def has(self, tensor: Tensor | None) -> bool:
        """Whether ``tensor`` is one of the copies, as an object."""
        return tensor is not None and any(copy() is tensor for copy in self._copies)


def nowhere(_: Tensor) -> None:
    """A place without room."""


class Net(nn.Module):
    """Two large weights, one of them used twice, and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(torch.tanh(self.enter(x)))
        return self.leave(torch.sigmoid(self.shared(y)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_of(model: nn.Module, index: int = 0) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))
    return model(x).square().sum()


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


Habit = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def to_none(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss_of(model, index).backward()
    optimizer.step()


def to_zero(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, index).backward()
    optimizer.step()


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    optimizer.zero_grad()
    for part in range(3):
        loss_of(model, 10 * index + part).backward()
    optimizer.step()


def never_zeroing(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    loss_of(model, index).backward()
    optimizer.step()


def retaining(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, index)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def twice_differentiated(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    """Penalize the gradient."""
    optimizer.zero_grad()
    wrt = list(model.parameters())
    torch.autograd.backward([loss_of(model, index)], create_graph=True, inputs=wrt)
    penalty = torch.stack([gradient(p).square().sum() for p in wrt]).sum()
    optimizer.zero_grad()
    penalty.backward()
    optimizer.step()


def clipping(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    optimizer.zero_grad()
    loss_of(model, index).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def swapping(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    """Put gradients away and back again, as one does between two losses."""
    optimizer.zero_grad()
    loss_of(model, index).backward()
    first = [gradient(p) for p in model.parameters()]
    optimizer.zero_grad()
    loss_of(model, index + 50).backward()
    for parameter, grad in zip(model.parameters(), first, strict=True):
        parameter.grad = grad - 0.5 * gradient(parameter)
    optimizer.step()


HABITS: tuple[Habit, ...] = (
    to_none,
    to_zero,
    accumulating,
    never_zeroing,
    retaining,
    twice_differentiated,
    clipping,
    swapping,
)
