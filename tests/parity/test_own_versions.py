"""Tensors of one storage that count their versions each by itself keep their bytes apart.

Cells of LSTMs that no library runs as a whole cut their gates with `torch.unsafe_chunk` and write
each part in place: all parts have the same version then, and other bytes than when the first one
was saved.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pack_padded_sequence

import belady
from tests.support.models import Task
from tests.support.training import Training, at_tight_budget, differences, plain, repeatable

WIDTH, STEPS = 64, 3
# What PyTorch says of `Projected`.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with repeatable():
        yield


class Cell(nn.Module):
    """A cell, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return state[0]


class Projected(nn.Module):
    """An LSTM that PyTorch has no kernel for on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 2 * WIDTH, proj_size=WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


class Packed(nn.Module):
    """Sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(len(x)) % STEPS + 1
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.lstm(packed)[1][0][0]


class Parts(nn.Module):
    """Parts that are written in place, and others that are seen through views."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.first(x[:, 0])
        a, b, c, d = gates.unsafe_chunk(4, 1)
        return a.sigmoid_() * b.tanh_() + c.view(-1, WIDTH).sigmoid_() * d.sigmoid_().exp()


def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, wanted = torch.randn(2, size, STEPS, WIDTH, generator=generator)
    return x, wanted[:, 0]


def task(kind: type[nn.Module]) -> Task:
    return Task(kind.__name__, lambda: [kind()], batch, mse_loss)


kinds = pytest.mark.parametrize("kind", [Cell, Projected, Packed, Parts])
ITERATIONS = range(6)


@kinds
@pytest.mark.parametrize("policy", ["auto", "floor", "lifetime"])
def test_gradients_are_those_of_plain_pytorch(kind: type[nn.Module], policy: str) -> None:
    expected = Training(task(kind)).run(plain, ITERATIONS)

    def train(budget: int) -> Training:
        training = Training(task(kind))
        with belady.virtualize(training.models, budget, policy=policy):
            return training.run(plain, ITERATIONS)

    assert differences(expected.outcome(), at_tight_budget(train).outcome()) == []


@kinds
@pytest.mark.parametrize("where", ["host", "disk", "encoded", "device"])
def test_saved_elsewhere_they_are_too(kind: type[nn.Module], where: str) -> None:
    def saved(training: Training, index: int) -> list[Tensor]:
        x, wanted = training.batch(index)
        with belady.save_on(where):
            loss = mse_loss(training.model(x), wanted)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return [loss.detach()]

    found = Training(task(kind)).run(saved, ITERATIONS).outcome()
    expected = Training(task(kind)).run(plain, ITERATIONS).outcome()
    assert differences(expected, found) == []


def test_views_of_one_tensor_move_once() -> None:
    whole = nn.Linear(WIDTH, 4 * WIDTH)
    carried: list[int] = []
    with belady.save_on("host"):
        parts = whole(torch.randn(8, WIDTH)).chunk(4, 1)
        result = (parts[0] * parts[1] + parts[2] * parts[3]).sum()
    node = result.grad_fn
    assert node is not None
    for product, _ in node.next_functions[0][0].next_functions:
        saved = (product._saved_self, product._saved_other)
        carried += [it.untyped_storage().data_ptr() for it in saved]
    assert len(set(carried)) == 1
