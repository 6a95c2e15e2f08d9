"""The hybrid policy without convolutions that run again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.ir.legality import check
from belady.ir.plan import Budget, Plan, Recompute
from belady.ir.trace import Trace
from belady.planners import plan, smallest_budget
from belady.simulate import simulate
from tests.support.builder import OpSpec, build_trace
from tests.unit.planners.nets import gpu

MB = 10**6


def layers(count: int, *, convolutions: bool) -> Trace:
    """Two ops in turn, both quickly made again; of one kind may be convolutions."""
    op = OpSpec(nbytes=100 * MB, device_us=100, replayable=True)
    trace = build_trace([op, op] * count)
    names = ("aten.convolution.default", "aten.native_batch_norm.default")
    ops = [
        replace(it, name=names[index % 2] if convolutions and it.replayable else it.name)
        for index, it in enumerate(trace.ops)
    ]
    return replace(trace, ops=tuple(ops))


def planned(policy: str, trace: Trace) -> Plan:
    least, most = (smallest_budget(it, trace, gpu(), Budget(0)) for it in ("floor", "baseline"))
    return plan(policy, trace, gpu(), Budget((2 * least + most) // 3))


def run_again(made: Plan, trace: Trace) -> set[str]:
    replays = (it for it in made.decisions.values() if isinstance(it, Recompute))
    return {trace.ops[index].name for it in replays for index in it.ops}


def test_no_convolution_runs_again_where_others_do() -> None:
    trace = layers(8, convolutions=True)
    assert "aten.convolution.default" in run_again(planned("hybrid", trace), trace)
    made = planned("hybrid_cheap", trace)
    assert run_again(made, trace) == {"aten.native_batch_norm.default"}
    assert made.trace == trace.fingerprint
    verdict = check(trace, gpu(), made, made.budget)
    assert verdict.ok
    assert simulate(trace, gpu(), made).seconds == pytest.approx(made.predicted_seconds)


def test_without_convolutions_it_is_the_hybrid_policy() -> None:
    trace = layers(8, convolutions=False)
    made, usual = planned("hybrid_cheap", trace), planned("hybrid", trace)
    assert made.planner == usual.planner.replace("hybrid/", "hybrid_cheap/")
    assert replace(made, planner=usual.planner) == usual
