"""Replays that come early, to where another runs the same ops: no other bit, and each op once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from belady.ir.plan import Assignment, Plan, Recompute
from belady.ir.trace import Phase, Trace
from belady.planners.due import timed
from belady.planners.replays import cheapest
from tests.parity.racing import every_replay, legal
from tests.parity.test_graph_deep import plan_of, rows
from tests.parity.test_graph_plans import CAPTURED, damage, expected, step_of
from tests.support.models import Task
from tests.support.training import plain


class Branching(torch.nn.Module):
    """Two values branch off after one product, and backward reads them one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 32)
        self.last = torch.nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        product = self.first(x)
        return self.last((2 * product).exp() * (3 * product).tanh())


BRANCHING = Task("branching", lambda: [Branching()], rows)


def made_again(trace: Trace, *, at_once: bool) -> Plan:
    """What branches off, again from what the product starts from."""
    replays = {
        value: replay
        for value in trace.saved
        if trace.ops[trace.values[value].producer].name in ("aten.exp.default", "aten.tanh.default")
        and (replay := cheapest(trace, value)) is not None
    }
    assert len(replays) == 2
    first = min(it.at for it in replays.values())
    sooner = dict.fromkeys(replays, first) if at_once else {}
    return plan_of(trace, {**timed(trace, replays, sooner)})


def products(*, at_once: bool) -> tuple[list[str], int]:
    """What differs from plain PyTorch, and how often the products of two iterations run."""
    with torch.profiler.profile() as ran:
        wrong, _ = damage(
            BRANCHING, plain, [("direct", lambda trace: made_again(trace, at_once=at_once))] * 2
        )
    return wrong, sum(it.count for it in ran.key_averages() if it.key == "aten::addmm")


def test_an_op_of_two_replays_runs_once_where_both_are_made_at_once() -> None:
    expected(BRANCHING, plain, "cpu", 2)
    (apart, twice), (wrong, once) = products(at_once=False), products(at_once=True)
    assert apart == wrong == []
    # In each of two iterations.
    assert once == twice - 2


def at_any_time(seed: int) -> Callable[[Trace], Plan]:
    """All that can be made again, each at its read or at some boundary of backward before it."""

    def choose(trace: Trace) -> Plan:
        chance, replays = random.Random(seed), every_replay(trace)
        begins = next(at for at, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
        sooner = {
            value: chance.randint(begins, it.at)
            for value, it in replays.items()
            if chance.random() < 0.7
        }
        made = timed(trace, replays, sooner)
        assignments = tuple(Assignment(value, it) for value, it in made.items())
        return legal(trace, replace(plan_of(trace, {}), assignments=assignments))

    return choose


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "kinds", [["direct", "threads"], pytest.param(["cuda"] * 4, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("task", CAPTURED, ids=str)
def test_values_made_again_at_any_time_change_no_bit(task: Task, kinds: list[str]) -> None:
    wrong, host = damage(
        task, step_of(task), [(kind, at_any_time(seed)) for seed, kind in enumerate(kinds)]
    )
    assert wrong == []
    values = {it.trace.fingerprint: it.trace.values for it in host.drawn}
    assert any(
        isinstance(it, Recompute) and it.at < (values[plan.trace][value].first_read or 0)
        for plan in host.plans
        for value, it in plan.decisions.items()
    )
