"""Counters of batches are taken out of a graph, and only they."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import belady
from belady.graph import counters as counted
from belady.graph.counters import Counters
from tests.support.modes import Counting


class Graphs:
    """Makes graphs as Dynamo captures them: one that adds ``amount`` to its second input."""

    @staticmethod
    def of(amount: int = 1, method: str = "add_", **more: int) -> fx.GraphModule:
        graph = fx.Graph()
        x, counter = graph.placeholder("x"), graph.placeholder("counter")
        graph.call_method(method, (counter, amount), more)
        graph.output((graph.call_function(torch.relu, (x,)),))
        return fx.GraphModule({}, graph)


def batch() -> Tensor:
    return torch.randn(3)


def test_what_is_taken_out_is_done_when_the_graph_has_run() -> None:
    module, x, counter = Graphs.of(), batch(), torch.tensor(41)
    counters = Counters(module, [x, counter])
    assert counters.numbers == (1,)
    module(x, counter)
    assert counter == 41
    (result,) = counters.counting(module)(x, counter)
    assert torch.equal(result, x.relu())
    assert counter == 42
    assert counter._version == 1


def test_a_mode_of_the_user_does_not_see_it() -> None:
    counter = torch.tensor(41)
    run = Counters(Graphs.of(), [batch(), counter]).counting(lambda *args: None)
    with Counting() as mode:
        run(None, counter)
    assert mode.calls == 0
    assert counter == 42


def test_nothing_is_counted_of_a_graph_that_fails() -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    counter = torch.tensor(41)
    run = Counters(Graphs.of(), [batch(), counter]).counting(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(batch(), counter)
    assert counter == 41


def test_what_is_put_back_stands_where_it_stood() -> None:
    graph = fx.Graph()
    x, *counters = (graph.placeholder(name) for name in ("x", "one", "two", "three"))
    graph.call_method("add_", (counters[2], 1))
    graph.call_method("add_", (counters[0], 1))
    made = graph.call_function(torch.relu, (x,))
    graph.call_method("add_", (counters[1], 1))
    graph.output((made,))
    module = fx.GraphModule({}, graph)
    before = [(node.op, node.target, str(node.args)) for node in graph.nodes]
    values = [batch(), *(torch.tensor(number) for number in range(3))]
    taken = Counters(module, values)
    assert taken.numbers == (1, 2, 3)
    assert len(graph.nodes) == len(before) - 3
    taken.put_back()
    assert [(node.op, node.target, str(node.args)) for node in graph.nodes] == before
    module(*values)
    assert values[1:] == [1, 2, 3]


@pytest.mark.parametrize(
    ("module", "counter"),
    [
        (Graphs.of(amount=2), torch.tensor(0)),
        (Graphs.of(method="mul_"), torch.tensor(0)),
        (Graphs.of(alpha=2), torch.tensor(0)),
        (Graphs.of(), torch.tensor(0.0)),
        (Graphs.of(), torch.zeros(2, dtype=torch.int64)),
    ],
    ids=["adds more", "is no addition", "adds twice as much", "no whole number", "several"],
)
def test_anything_else_stays(module: fx.GraphModule, counter: Tensor) -> None:
    before = module.code
    counters = Counters(module, [batch(), counter])
    assert counters.numbers == ()
    assert module.code == before
    assert counters.counting(module) is module


def test_what_is_read_stays() -> None:
    module = Graphs.of()
    (addition,) = (node for node in module.graph.nodes if node.op == "call_method")
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    output.args = ((*output.args[0], addition),)
    assert Counters(module, [batch(), torch.tensor(0)]).numbers == ()
    (place,) = (node for node in module.graph.nodes if node.name == "counter")
    output.args = ((place,),)
    assert Counters(module, [batch(), torch.tensor(0)]).numbers == ()


def test_what_lies_beside_another_input_stays() -> None:
    both = torch.zeros(2, dtype=torch.int64)
    assert Counters(Graphs.of(), [both, both[1]]).numbers == ()


def test_inputs_without_a_storage_are_none() -> None:
    x = torch.randn(3, 3).to_sparse()
    assert Counters(Graphs.of(), [x, torch.tensor(0)]).numbers == (1,)


class Norm(nn.Module):
    """A refused op, where asked for, and an error after a norm has counted."""

    def __init__(self, *, refused: bool) -> None:
        super().__init__()
        self.refused = refused
        self.norm = nn.BatchNorm1d(4)
        self.table = nn.Embedding(3, 4)

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        x = self.norm(x)
        x = x * self.norm.weight.prod() if self.refused else x
        return x + self.table(row)


@pytest.mark.parametrize("refused", [False, True])
def test_what_dynamo_captures_of_a_norm_is_counted_at_once(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    add = torch._foreach_add_

    def adding(tensors: list[Tensor], amount: int) -> None:
        calls.append(len(tensors))
        add(tensors, amount)

    monkeypatch.setattr(counted.torch, "_foreach_add_", adding)
    models = [Norm(refused=refused), Norm(refused=refused)]
    models[1].load_state_dict(models[0].state_dict())
    row = torch.tensor([1])
    with belady.virtualize(models[1], "1GiB", engine="graph") as vm:
        for at in (row, row, row + 7, row):
            for model in models:
                with pytest.raises(IndexError) if at is not row else nullcontext():
                    model(torch.linspace(0, 1, 12).reshape(3, 4), at).sum().backward()
        assert ("prod" in vm.report()) == refused
    torch._dynamo.reset()
    assert calls == ([] if refused else [1] * 3)
    # A captured graph that fails leaves nothing behind, neither counts nor statistics.
    assert models[1].norm.num_batches_tracked == (4 if refused else 3)
    assert models[0].norm.num_batches_tracked == 4
