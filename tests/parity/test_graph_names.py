"""Captured graphs call modules as the eager engine does: by their paths in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.errors import InfeasibleBudgetError
from belady.explain.subjects import find
from belady.ir.trace import Phase, Trace
from belady.report.text import describe

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

ROOM = 1 << 30
X = (2, 4)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(this) -> None:
        super().__init__()
        this.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(this, x: Tensor) -> Tensor:
        return this.inner(x).sigmoid()


class Breaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).sigmoid()
        torch._dynamo.graph_break()
        return self.inner(x).tanh()


class Own(nn.Module):
    """Its frame has parameters and no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.weight).sigmoid()
        torch._dynamo.graph_break()
        return (x * self.weight).tanh()


class Net(nn.Module):
    def __init__(self, of: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.row = nn.ModuleList([of(), of()])
        self.named = nn.ModuleDict({"a b": of()})
        self.again, self.elsewhere = self.row[0], [Block()]

    def forward(this, x: Tensor, *rest: Tensor) -> Tensor:
        x = this.row[1](this.row[0](x))
        x = this.again(this.named["a b"](x))
        return this.elsewhere[0](x).exp()


def traced(engine: str, *models: nn.Module) -> Trace:
    with belady.virtualize(list(models), ROOM, policy="floor", engine=engine) as vm:
        for _ in range(6):
            x = torch.ones(X)
            for model in models:
                x = model(x)
            x.sum().backward()
        run = vm.run()
    assert run is not None
    return run.trace


def named(trace: Trace) -> dict[tuple[str, ...], dict[str, None]]:
    """Modules in the order in which they run, by root and direction."""
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for op in trace.ops:
        if op.phase in (Phase.FORWARD, Phase.BACKWARD) and op.module:
            key = trace.roots[op.pass_index], op.phase.value
            found.setdefault(key, {})[op.module] = None
    return found


def models() -> dict[str, Callable[[], list[nn.Module]]]:
    one = nn.Sequential(Block(), nn.Linear(4, 4), nn.ReLU())
    return {
        "sequential": lambda: [nn.Sequential(Block(), Block(), nn.Linear(4, 4), nn.ReLU())],
        "another name than self": lambda: [Net()],
        "of torch": lambda: [nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)],
        "two of a class": lambda: [Net(), Net()],
        "parts of one another": lambda: [one, one[0]],
    }


@pytest.mark.parametrize("name", models())
def test_modules_are_called_as_by_the_eager_engine(name: str) -> None:
    torch.manual_seed(0)
    expected = named(traced("eager", *models()[name]()))
    assert expected
    found = named(traced("graph", *models()[name]()))
    assert {key: set(paths) for key, paths in found.items()} == {
        key: set(paths) for key, paths in expected.items()
    }


@pytest.mark.parametrize("of", [Breaking, Own])
def test_one_graph_of_several_modules_is_called_as_each(of: Callable[[], nn.Module]) -> None:
    expected, found = named(traced("eager", Net(of))), named(traced("graph", Net(of)))
    for key, paths in found.items():
        # What stands between the graphs is not captured.
        assert set(paths) <= set(expected[key])
        assert {path for path in expected[key] if path.startswith(("row", "named"))} <= set(paths)


def test_a_module_of_a_sequential_is_explained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Sigmoid())
    subject = find(traced("graph", model), "[3]")
    assert subject.modules == ("3",)
    assert subject.values


def test_a_refusal_names_the_module() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4096))
    with (
        belady.virtualize(model, 1 << 12, engine="graph"),
        pytest.raises(InfeasibleBudgetError, match="in module '1'"),
    ):
        model(torch.ones(X)).sum().backward()


def test_nothing_of_a_report_is_dynamos() -> None:
    model = Net()
    with belady.virtualize(model, ROOM, policy="floor", engine="graph") as vm:
        for _ in range(4):
            model(torch.ones(X)).sum().backward()
        run = vm.run()
    assert run is not None
    assert "L['" not in describe(run)
