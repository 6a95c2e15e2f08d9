"""Models whose first call makes their parameters train as plain PyTorch has them train."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

import belady
from tests.support.training import raw

ROOM = 1 << 30
ENGINES = ["eager", "graph"]


pytestmark = pytest.mark.usefixtures("captures")


class Own(nn.Module):
    """Waits for its first call by a hook of its own, as layers of PyTorch Geometric do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = UninitializedParameter()
        self.hook = self.register_forward_pre_hook(self._make)

    @torch.no_grad()
    def _make(self, _: nn.Module, args: tuple[Tensor]) -> None:
        self.weight.materialize((args[0].size(-1), 8))
        nn.init.normal_(self.weight)
        self.hook.remove()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Net(nn.Module):
    """Draws random numbers before its layers do, and has one that lacks nothing but its sizes."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.drop, self.first = nn.Dropout(0.3), nn.LazyLinear(16)
        self.norm, self.own = nn.LazyBatchNorm1d(), Own()
        self.even, self.last = nn.LazyInstanceNorm1d(), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        if self.broken:
            torch._dynamo.graph_break()
        x = self.own(self.norm(self.first(x).relu()))
        return self.last(self.even(x[:, None])[:, 0].sigmoid())


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def trained(model: nn.Module, *, late: bool = False) -> list[Tensor]:
    """Train; ``late`` is an optimizer that is made when there are parameters."""
    optimizer = None if late else torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(6):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer = optimizer or torch.optim.Adam(model.parameters(), 0.01)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values(), torch.get_rng_state()]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(raw(a), raw(b)) for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "make",
    [Net, lambda: Net(broken=True), lambda: nn.LazyLinear(3)],
    ids=["net", "broken", "root"],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_call_changes_no_bit(
    engine: str, make: Callable[[], nn.Module], late: bool
) -> None:
    expected, model = trained(seeded(make), late=late), seeded(make)
    with belady.virtualize(model, ROOM, policy="floor", engine=engine) as vm:
        assert same(trained(model, late=late), expected)
        assert vm.run() is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_that_comes_later_is_waited_for(engine: str) -> None:
    def twice(model: nn.Sequential) -> list[Tensor]:
        before = trained(model)
        model[2] = nn.LazyLinear(3)
        return before + trained(model)

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    expected, model = twice(make()), make()
    with belady.virtualize(model, ROOM, policy="floor", engine=engine):
        assert same(twice(model), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_model_does_not_wait_for_another(engine: str) -> None:
    model, other = nn.Linear(4, 3), nn.LazyLinear(3)
    with belady.virtualize([model, other], ROOM, engine=engine) as vm:
        trained(model)
        assert vm.run() is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_never_initialized_is_said(engine: str) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.head = nn.Linear(4, 3), nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Unused()
    with belady.virtualize(model, ROOM, engine=engine) as vm:
        trained(model)
        assert vm.run() is None
        said = "calls of Unused run as plain PyTorch until head.weight is initialized"
        assert said in vm.report().splitlines()


def test_a_closure_that_initializes_is_not_run_twice() -> None:
    class Full(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("no room")

    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), Full())
    with (
        belady.virtualize(model, ROOM) as vm,
        pytest.raises(belady.OutOfMemoryError, match="it initializes parameters"),
    ):
        vm.step(lambda: model(torch.randn(8, 4)).sum().backward())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_closure_may_initialize(engine: str) -> None:
    expected, model = trained(seeded(Net)), seeded(Net)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def closure() -> Tensor:
        loss: Tensor = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        return loss.detach()

    with belady.virtualize(model, ROOM, policy="floor", engine=engine) as vm:
        losses = []
        for _ in range(6):
            losses.append(vm.step(closure))
            optimizer.step()
            optimizer.zero_grad()
        assert same([*losses, *model.state_dict().values(), torch.get_rng_state()], expected)
