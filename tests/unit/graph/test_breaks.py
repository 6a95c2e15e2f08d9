"""What is not captured is said with its place in the user's code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.graph.breaks import breaks

# Dynamo asks whether what stands between two graphs has a gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

ROOM = 1 << 30


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """The code of each subclass breaks so many lines below its ``def``."""

    below = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def place(self) -> str:
        return f", at {__file__}:{type(self).forward.__code__.co_firstlineno + self.below}"


class Loop(Layer):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = self.layer(x)
        return x


class Guarded(Layer):
    below = 3

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.layer(x)
            print(end="")
        finally:
            x = x.relu()
        return x


class Branch(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if x.sum() > 0:
            x = x.relu()
        return x


class Decided(Layer):
    """Whole graphs may have sizes that data decides, and no branches on them."""

    below = 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        some = x[x > 0]
        if some.numel():
            x = x + some.sum()
        return x


class Sized(Layer):
    """A size that data decides, which graphs of ours do not have; who refuses it knows no place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x + x[x > 0].sum()


class InTorch(Layer):
    below = 1

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = self.layer(x)
        return x


class Twice(Layer):
    """It goes on behind the first, and is given up for the second."""

    below = 4

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        print(end="")
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x.relu()
        return x


def said(model: nn.Module, engine: str) -> list[str]:
    with belady.virtualize(model, ROOM, policy="floor", engine=engine) as vm:
        model(torch.ones(2, 4)).sum().backward()
        assert vm.run() is None
        return vm.report().splitlines()[1:]


@pytest.mark.parametrize("make", [Loop, Guarded, Branch, InTorch])
def test_a_break_is_said_with_its_place(make: type[Layer]) -> None:
    model = make()
    notes = said(model, "graph")
    assert notes
    for note in notes:
        assert note.startswith("not captured, and so not managed: ")
        assert note.endswith(model.place())


def test_a_break_does_not_hide_the_next() -> None:
    model = Twice()
    first, second = said(model, "graph")
    assert first.endswith(f"{__file__}:{Twice.forward.__code__.co_firstlineno + 2}")
    assert second.endswith(model.place())


def test_what_has_no_place_is_said_too() -> None:
    @torch.compile(backend="eager", dynamic=False)
    def compiled(x: Tensor) -> Tensor:
        return x + 1

    found: list[str] = []
    with breaks(found.extend):
        for size in range(2, 12):
            compiled(torch.ones(size))
    (note,) = set(found)
    assert note.startswith("Dynamo recompile limit exceeded")


@pytest.mark.parametrize("make", [Loop, Guarded, Branch, Decided, InTorch])
def test_auto_says_where_it_came_to_the_eager_engine(make: type[Layer]) -> None:
    model = make()
    (note,) = said(model, "auto")
    assert note.startswith("engine='eager', since a call could not be captured as a whole: ")
    assert note.endswith(model.place())


def test_auto_says_what_a_graph_is_refused_for() -> None:
    (note,) = said(Sized(), "auto")
    assert "TraceError: aten." in note
    assert note.endswith("gives a tensor whose size is not fixed")
