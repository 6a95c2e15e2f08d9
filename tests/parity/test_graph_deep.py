"""Graphs of deep networks: rows of replays of any length, and code that is written in time."""

from __future__ import annotations

import sys
from collections.abc import Callable, ItemsView, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from belady.errors import PlanMismatchError
from belady.graph import doors, orders
from belady.graph.orders import orders_of
from belady.graph.parts import Drawn, ops_of
from belady.graph.program import program_of
from belady.ir.plan import Assignment, Budget, Decision, Offload, Plan
from belady.ir.trace import Tier, Trace
from tests.parity.graphs import PlannedHost, compiled
from tests.parity.racing import ROOM, hostile_carrier
from tests.parity.test_graph_plans import damage
from tests.parity.test_replays import Deep, all_nested, replayed, rows
from tests.support.models import Task
from tests.support.training import Training, plain

DEEP = Task("deep", lambda: [Deep()], rows)


def test_a_long_row_of_replays_is_no_deep_recursion() -> None:
    wrong, host = damage(DEEP, plain, [("direct", all_nested)])
    assert wrong == []
    assert replayed(host.plans[0]) >= 400


class Turned(torch.nn.Module):
    """A saved value, and a thousand views of it before what reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        made = turned = (self.last.weight[0] * x).sigmoid()
        for _ in range(1100):
            turned = turned.t()
        return self.last((turned * x).tanh() + made)


def test_a_long_row_of_views_is_no_deep_recursion() -> None:
    wrong, host = damage(Task("turned", lambda: [Turned()], rows), plain, [("direct", all_nested)])
    assert wrong == []
    assert replayed(host.plans[0]) > 0


def test_what_would_be_made_again_from_itself_is_refused(drawn: Drawn) -> None:
    (found,) = orders_of(drawn, all_nested(drawn.trace))
    one, two = [*found.replayed][5:7]
    turned = {one: found.replayed[two], two: found.replayed[one]}
    part = drawn.parts[0]
    with pytest.raises(PlanMismatchError, match="is to be made again from itself"):
        program_of(part.joint, part.layout, replace(found, replayed={**found.replayed, **turned}))


class Looks:
    """How often something was gone through."""

    def __init__(self) -> None:
        self.count = 0


class Row(tuple[Any, ...]):
    looks: Looks

    def __iter__(self) -> Iterator[Any]:
        self.looks.count += 1
        return super().__iter__()


class Table(dict[Any, Any]):
    looks: Looks

    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        self.looks.count += 1
        return super().items()


def looked_through(drawn: Drawn, looks: Looks) -> Drawn:
    """What a graph is, in parts that count how often they are gone through."""

    def row(items: Any) -> Row:
        made = Row(items)
        made.looks = looks
        return made

    def table(items: dict[Any, Any]) -> Table:
        made = Table(items)
        made.looks = looks
        return made

    old = drawn.parts[0]
    joint = replace(
        old.joint,
        forward=row(old.joint.forward),
        backward=row(old.joint.backward),
        primals=row(old.joint.primals),
    )
    layout = replace(old.layout, storage_of=table(old.layout.storage_of))
    parts = tuple(replace(it, joint=joint, layout=layout) for it in drawn.parts)
    return replace(drawn, parts=parts, values=tuple(table(it) for it in drawn.values))


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    training = Training(DEEP, "cpu")
    carrier = hostile_carrier("direct")
    host = PlannedHost(training.models, carrier, lambda it: plan_of(it, {}))
    try:
        with compiled(training, host):
            training.run(plain, [0])
    finally:
        carrier.close()
    (found,) = host.drawn
    return found


def plan_of(trace: Trace, decisions: dict[int, Decision]) -> Plan:
    assignments = tuple(Assignment(value, it) for value, it in decisions.items())
    return Plan(trace.fingerprint, "some/1", Budget(ROOM), assignments)


def moved(trace: Trace, value: int) -> Offload:
    first, read = trace.values[value].first_save, trace.values[value].first_read
    assert read is not None
    return Offload(Tier.DISK, first - 1, first, read, read)


def test_code_is_written_in_proportion_to_a_graph(
    drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks(decisions: dict[int, Decision]) -> int:
        seen = Looks()

        def counted(*given: Any) -> Any:
            seen.count += 1
            return ops_of(*given)

        monkeypatch.setattr(orders, "ops_of", counted)
        looked = looked_through(drawn, seen)
        (found,) = orders_of(looked, plan_of(drawn.trace, decisions))
        program_of(looked.parts[0].joint, looked.parts[0].layout, found)
        return seen.count

    replays = all_nested(drawn.trace).decisions
    moves = {value: moved(drawn.trace, value) for value in replays}
    # However many values leave the device, the graph is gone through as often.
    for every in (replays, moves):
        some = dict([*every.items()][:4])
        assert len(every) >= 400
        assert looks(every) == looks(some)


def traced(count: int, monkeypatch: pytest.MonkeyPatch, backend: Callable[..., Any]) -> Any:
    """What stands in the place of AOTAutograd gives for a graph of so many inputs."""
    graph = fx.Graph()
    graph.output([graph.placeholder(f"x{number}") for number in range(count)])
    monkeypatch.setattr(doors, "aot_autograd", lambda **_: backend)
    before = sys.getrecursionlimit()
    module: Any = SimpleNamespace(graph=graph)
    found = doors.compile_joint(module, (), Compilers())
    assert sys.getrecursionlimit() == before
    return found


def test_a_sum_of_thousands_of_terms_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    # As torch 2.13 writes of the results of a graph which of them are tensors.
    text = " + ".join(["([x] if x else [])"] * 5000)
    code = traced(5000, monkeypatch, lambda *_: compile(text, "", "eval"))
    assert eval(code, {"x": 0}) == []


def test_a_stack_is_not_gone_down_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced(20_000, monkeypatch, lambda *_: sys.getrecursionlimit()) == 5_000


class Compilers:
    forward = backward = inference = partition = None
