"""tvDNN's heuristic beside its integer program, on the founders' networks and machines."""

from __future__ import annotations

from functools import cache

import pytest

from belady.ir.plan import Budget
from belady.planners import plan, smallest_budget
from belady.planners.moves import Case
from belady.planners.tvdnn import Swapping
from benchmarks.founders.claims import Net
from benchmarks.founders.iterations import Iteration

POLICY = "tvdnn_greedy"


@cache
def iteration(machine: str, workload: str, batch: int) -> Iteration:
    return Iteration(machine, Net(workload, batch))


# The last figure is what tvdnn_ilp proves to be the fastest, in up to a minute each, over an
# iteration that keeps everything: it depends on ratios of seconds and bytes alone.
@pytest.mark.parametrize(
    ("machine", "workload", "batch", "more", "fastest"),
    [
        ("V100", "vgg19", 120, 1.0, 1.23733),
        ("V100", "vgg19", 120, 1.05, 1.20670),
        ("V100", "vgg19", 120, 1.1, 1.14926),
        ("Titan X", "vgg19", 128, 1.0, 1.05722),
        ("Titan X", "vgg16", 256, 1.05, 1.07170),
        ("K40m", "vgg16", 240, 1.05, 1.05600),
    ],
)
def test_at_most_a_twentieth_over_the_fastest_schedule(
    machine: str, workload: str, batch: int, more: float, fastest: float
) -> None:
    it = iteration(machine, workload, batch)
    trace, hardware = it.plain.trace, it.hardware
    least = smallest_budget(POLICY, trace, hardware, Budget(0))
    budget = Budget(int(more * least))
    kept = Swapping(Case(trace, hardware, budget)).keep_seconds
    made = plan(POLICY, trace, hardware, budget)
    assert 0.9999 * fastest <= made.predicted_seconds / kept <= 1.05 * fastest
