"""Replays at one boundary of a graph run each op once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from belady.ir.plan import Assignment, Budget, Plan
from belady.ir.trace import Trace
from tests.parity.graphs import PlannedHost, compiled
from tests.parity.racing import ROOM, every_replay, hostile_carrier
from tests.support.models import Task
from tests.support.training import Training, differences, plain, repeatable

WIDTH, BLOCKS, TOKENS = 16, 3, 4


class Block(nn.Module):
    """Backward reads two results that start from one that it does not read."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        made = self.one(x)
        return self.two(self.join(made.tanh(), made.sigmoid())) + x


def attend(query: Tensor, key: Tensor) -> Tensor:
    """Its backward reads both in one op."""
    return nn.functional.scaled_dot_product_attention(query, key, query)


def attended(query: Tensor, key: Tensor) -> Tensor:
    """The same, with what was made last read first."""
    return attend(key, query)


def gate(one: Tensor, other: Tensor) -> Tensor:
    """Its backward reads one after the other."""
    return one * other


def _batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = (size, 1, TOKENS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def task(join: Callable[[Tensor, Tensor], Tensor]) -> Task:
    def models() -> list[nn.Module]:
        return [nn.Sequential(*(Block(join) for _ in range(BLOCKS)))]

    return Task(join.__name__, models, _batch, nn.functional.mse_loss)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


def planned(trace: Trace) -> Plan:
    """Both results of each block are made again."""
    saved = {trace.values[value].producer for value in trace.saved}
    made = tuple(
        Assignment(value, it)
        for value, it in every_replay(trace, "addmm").items()
        if not saved.issuperset(it.ops)
    )
    return Plan(trace.fingerprint, "made/1", Budget(ROOM), made)


def called(events: Any, name: str) -> int:
    return sum(it.count for it in events.key_averages() if it.key == name)


@pytest.mark.parametrize(("join", "times"), [(attend, 1), (attended, 1), (gate, 2)])
def test_an_op_runs_once_at_a_boundary(
    join: Callable[[Tensor, Tensor], Tensor], times: int
) -> None:
    expected = Training(task(join)).run(plain, range(4)).outcome()
    training, carrier = Training(task(join)), hostile_carrier("direct")
    host = PlannedHost(training.models, carrier, planned)
    with compiled(training, host):
        training.run(plain, range(3))
        with profile(activities=[ProfilerActivity.CPU]) as events:
            training.run(plain, [3])
    carrier.close()
    assert differences(expected, training.outcome()) == []
    assert host.reasons == []
    (plan,) = host.plans
    assert len(plan.assignments) == 2 * BLOCKS
    assert called(events, "aten::addmm") == (2 + times) * BLOCKS
    assert called(events, "aten::tanh") == called(events, "aten::sigmoid") == 2 * BLOCKS
    # Where both are made at one boundary it is in the order of forward.
    made = [it.name for it in events.events() if it.name in ("aten::tanh", "aten::sigmoid")]
    assert times > 1 or made == ["aten::tanh", "aten::sigmoid"] * 2 * BLOCKS
