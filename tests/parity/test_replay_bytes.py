"""What replays hold while they run, counted, is what a plan says: in both engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from belady.ir.curves import curve
from belady.ir.hardware import Allocator
from belady.ir.plan import Assignment, Budget, Keep, Plan, Recompute
from belady.ir.replay import closure
from belady.ir.scratch import replay_bytes
from belady.ir.trace import Trace
from belady.measure.recipes import Recipe
from tests.parity.graphs import PlannedHost, compiled
from tests.parity.racing import ROOM, hostile_carrier, legal, observed, train
from tests.support.models import Task
from tests.support.training import Training
from tests.unit.graph.counting import Counter, counting

EXACT = Allocator(1, 0.0, 0)
ROWS, WIDTH = 4096, 64
UNIT = ROWS * WIDTH * 4
LONGEST = 32


def images(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH, generator=generator), torch.zeros(ROWS)


class Gate(nn.Module):
    """What it multiplies by is made of two branches, each of which needs much memory for a while.

    The second branch is read first in their product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        wide = torch.cat([x.detach()] * 8, 1)
        small = (wide * 2.0).exp().mean(1, keepdim=True)
        large = torch.sin(torch.cat([x.detach()] * 8, 1) * 3.0)
        return self.second(x) * ((large * small).mean(1, keepdim=True) + self.offset)


class Twice(nn.Module):
    """Two values that one op of backward reads, the one it reads last made from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.offsets = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        wide = x.detach()
        one = (torch.cat([wide] * 8, 1) * 2.0).exp().mean(1, keepdim=True) + self.offsets[0]
        part = torch.sigmoid(torch.cat([wide] * 8, 1))
        other = (part * one.detach()).mean(1, keepdim=True) + self.offsets[1]
        return self.second(x) + other * one


def again(trace: Trace) -> Plan:
    """All small values made again, from what is kept or from one another."""
    small = {v for v in trace.saved if trace.storages[trace.values[v].storage].nbytes < UNIT}
    ways = {v: closure(trace, v, lambda _: True, LONGEST) for v in small}
    chosen = (Assignment(v, ways.get(v) or Keep()) for v in trace.saved)
    return legal(trace, Plan(trace.fingerprint, "again/1", Budget(ROOM), tuple(chosen)))


def step(training: Training, index: int) -> list[Tensor]:
    loss = training.model(training.batch(index)[0]).mean()
    loss.backward()
    for optimizer in training.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return [loss]


@pytest.mark.parametrize("model", [Gate, Twice])
def test_in_graphs(model: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: list[int] = []

    def choose(trace: Trace) -> Plan:
        plan = again(trace)
        assert any(replay_bytes(trace, v, it, EXACT) > 8 * UNIT for v, it in replays(plan))
        peaks.append(max(curve(trace, plan, EXACT)))
        return plan

    training, carrier = Training(Task("gate", lambda: [model()], images)), hostile_carrier("direct")
    host, counter = PlannedHost(training.models, carrier, choose), Counter()
    with compiled(training, host):
        x, _ = training.batch(0)
        counter.track(x, *training.model.parameters())
        loss = training.model(x).sum()
        with counting(counter, monkeypatch):
            loss.backward()
    carrier.close()
    assert 8 * UNIT < counter.peak <= peaks[-1]


def test_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("twice", lambda: [Twice()], images)
    seen = observed(task, step, "cpu")
    plan = again(seen.trace)
    nbytes = [seen.trace.storages[seen.trace.values[v].storage].nbytes for v, _ in replays(plan)]
    most = max(replay_bytes(seen.trace, v, it, EXACT) for v, it in replays(plan)) + sum(nbytes)
    counter, run, held = Counter(), Recipe.run, list[int]()

    def counted(self: Recipe, tensor_of: Any) -> tuple[Tensor, ...]:
        made = run(self, tensor_of)
        counter.track(*made)
        held.append(counter.live_bytes())
        return made

    monkeypatch.setattr(Recipe, "run", counted)
    carrier = hostile_carrier("direct")
    try:
        train(task, step, plan, seen, carrier)
    finally:
        carrier.close()
    assert 8 * UNIT < max(held) <= most
    # Nothing is made twice.
    assert len(held) == 2 * sum(len(it.ops) for _, it in replays(plan))


def replays(plan: Plan) -> list[tuple[int, Recompute]]:
    return [(v, it) for v, it in plan.decisions.items() if isinstance(it, Recompute)]
