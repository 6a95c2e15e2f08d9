"""Movements at the seams of fused kernels, and norms as they are in these."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from belady.graph.orders import Act
from belady.graph.replays import from_statistics
from belady.graph.seams import at_seams, read_in_run, seams_of, told_at
from belady.ir.legality import check
from belady.ir.plan import Assignment, Budget, Offload, Plan
from belady.ir.trace import Phase, Tier, Trace
from belady.simulate import simulate
from tests.unit.simulate.cases import gpu, plan_of, trace_of

# Seams: before op 0, around the convolutions (ops 2 and 6) and at the end.
NAMES = ("tanh", "exp", "convolution", "relu", "tanh", "exp", "convolution", "relu", "exp", "tanh")
MOVE = Offload(Tier.HOST, 0, 4, 8, 9)


def traced(values: list[tuple[int, int, int]], names: tuple[str, ...] = NAMES) -> Trace:
    trace = trace_of([1.0] * len(names), values)
    ops = (
        replace(op, name=f"aten.{name}.default") for op, name in zip(trace.ops, names, strict=True)
    )
    return replace(trace, ops=tuple(ops))


def moves(plan: Plan) -> list[tuple[int, int]]:
    found = [it.decision for it in plan.assignments]
    return [(it.free_at, it.copy_in_at) for it in found if isinstance(it, Offload)]


def seamed(trace: Trace, *decisions: Offload, budget: int = 1 << 40) -> Plan:
    plan = plan_of(trace, *decisions, budget=budget)
    assert check(trace, gpu(), plan, plan.budget).ok
    made = at_seams(trace, gpu(), plan)
    assert check(trace, gpu(), made, made.budget).ok
    return made


@pytest.mark.parametrize(
    ("free", "back", "expected"),
    [(4, 8, (6, 7)), (1, 9, (2, 7)), (2, 7, (2, 7)), (3, 6, (3, 6)), (4, 5, (4, 5))],
)
def test_bytes_go_later_and_come_back_earlier(
    free: int, back: int, expected: tuple[int, int]
) -> None:
    made = seamed(traced([(100, 0, 9)]), replace(MOVE, free_at=free, copy_in_at=back))
    assert moves(made) == [expected]


def test_the_time_is_noted_at_some_seams_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced([(100, 0, 9)], NAMES * 3)
    ops = [replace(it, phase=Phase.LOSS) if 12 < at < 17 else it for at, it in enumerate(trace.ops)]
    trace = replace(trace, ops=tuple(ops))
    seams = seams_of(trace)
    assert told_at(trace) == []
    monkeypatch.setattr("belady.graph.seams._TOLD", 4)
    found = told_at(trace)
    assert found == [6, 12, 17, 22, 26]
    assert {*found} <= {*seams} - {len(trace.ops)}


def test_random_ops_and_writes_are_seams() -> None:
    trace = traced([(100, 0, 9)])
    ops = list(trace.ops)
    ops[4] = replace(ops[4], random=True)
    assert moves(seamed(replace(trace, ops=tuple(ops)), MOVE)) == [(4, 7)]


def test_movements_stay_where_the_budget_has_no_room_for_them_at_a_seam() -> None:
    # The second value lives beside ops 4 and 5 alone, from where the first one has gone.
    trace = traced([(100, 0, 9), (50, 4, 5), (10, 1, 9)])
    moved = {0: MOVE, 2: Offload(Tier.HOST, 1, 5, 8, 9)}
    assignments = tuple(Assignment(value, move) for value, move in moved.items())
    plan = Plan(trace.fingerprint, "by hand", Budget(119), assignments)
    assert check(trace, gpu(), plan, plan.budget).ok
    made = at_seams(trace, gpu(), plan)
    assert check(trace, gpu(), made, made.budget).ok
    assert moves(made) == [(4, 7), (6, 7)]
    # What is predicted is of what is carried out, and nothing is left to move.
    assert made.predicted_peak_bytes == check(trace, gpu(), made, made.budget).peak_bytes
    assert made.predicted_seconds == simulate(trace, gpu(), made).seconds
    assert at_seams(trace, gpu(), made) == made


def test_a_run_begins_with_what_came_back_for_any_of_its_ops() -> None:
    def step(name: str, read: str) -> Any:
        node = SimpleNamespace(target=f"aten.{name}.default", args=(), kwargs={})
        return SimpleNamespace(node=node, inputs=[read])

    names = (("relu", "a"), ("exp", "kept"), ("tanh", "b"), ("relu", "c"), ("mm", "d"))
    steps = [step(name, read) for name, read in names]
    layout: Any = SimpleNamespace(is_op=lambda _: True, writes_to=lambda _: [])
    nodes = cast(Any, ["a", "b", "c", "d"])
    # Between the second and the third op something is due, so a run ends there.
    acts = {2: [(Act.FREE, 9)]}
    assert read_in_run(steps, layout, acts, nodes) == [["a"], [], ["b", "c"], [], ["d"]]


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (6, 4, 3, 3)])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_from_its_statistics_is_the_norm(shape: tuple[int, ...], affine: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 1
    weight, bias = (torch.rand(4) + 1, torch.rand(4)) if affine else (None, None)
    norm = torch.ops.aten._native_batch_norm_legit.no_stats
    expected, mean, inverse = norm(x, weight, bias, True, 0.0, 1e-5)
    found = from_statistics(x, weight, bias, mean, inverse, 1e-5)
    torch.testing.assert_close(found, expected)
    assert from_statistics(x.bfloat16(), weight, bias, mean, inverse, 1e-5).dtype is torch.bfloat16
