"""Mixes that make whole segments again, and replays that are given up where they do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from belady.ir.plan import Recompute
from belady.ir.trace import Trace
from belady.planners import plan
from belady.planners.moves import Case, movable
from belady.planners.repairs import heavy, worst
from belady.planners.segments import bottlenecks, segmented
from belady.planners.spread import held_bytes
from belady.simulate import bound
from tests.support.builder import OpSpec, build_trace
from tests.unit.planners.nets import gpu
from tests.unit.planners.test_hybrid import MB, PLENTY, budgets

SMALL = OpSpec(nbytes=25 * MB, device_us=150, saves_output=True, replayable=True)
LARGE = OpSpec(nbytes=100 * MB, device_us=150, saves_output=True, replayable=True)


def written(trace: Trace, op: int) -> int:
    return trace.ops[op].writes[0]


def test_a_bottleneck_is_all_that_later_ops_need() -> None:
    # Op 2 reads what op 0 wrote, and the branch past it is read by op 3.
    plain = OpSpec(nbytes=8192, saves_output=True)
    specs = [plain, plain, OpSpec(nbytes=8192, branch=1), OpSpec(nbytes=8192, join=True), plain]
    trace = build_trace(specs)
    found = bottlenecks(trace)
    reads = [set(op.reads) for op in trace.ops[:5]]
    for op in range(5):
        made_before = {v for before in range(op + 1) for v in trace.ops[before].writes}
        needed = made_before & set().union(*reads[op + 1 :])
        assert (written(trace, op) in found) == (needed == {written(trace, op)}), op
    assert any(written(trace, op) not in found for op in range(4))


def test_segments_begin_at_bottlenecks_and_become_shorter() -> None:
    trace, hardware = build_trace([SMALL, SMALL, SMALL, LARGE] * 16), gpu()
    case = Case(trace, hardware, PLENTY)
    nbytes = {value: held_bytes(case, value) for value in movable(trace)}
    mixes = [*segmented(trace, nbytes, nbytes.keys())]
    begins = [set(nbytes) - mix for mix in mixes]
    assert all(it <= bottlenecks(trace) for it in begins)
    assert len(begins) > 3
    counts = [len(it) for it in begins]
    assert counts == sorted(set(counts))
    assert counts[0] in (3, 4)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_with_little_memory_segments_are_made_again_and_time_stays_near_the_bound(
    share: float,
) -> None:
    """Short replays and copies alone take up to twice as long."""
    trace = build_trace([SMALL, SMALL, SMALL, SMALL, LARGE] * 12)
    hardware = gpu(link_rate=2e10)
    (budget,) = budgets(trace, hardware, share)
    made = plan("hybrid", trace, hardware, budget)
    assert made.predicted_seconds < 1.04 * bound(trace, hardware, budget).seconds


def test_the_worst_op_of_each_stretch_without_room() -> None:
    assert worst(np.array([1, -1, -3, -2, 0, 5, -4, 1, -1])) == [2, 6, 8]
    assert worst(np.array([0, 1])) == []


def test_the_heaviest_replays_are_those_whose_end_helps_most() -> None:
    trace, hardware = build_trace([SMALL, LARGE, SMALL, SMALL, LARGE, SMALL]), gpu()
    case = Case(trace, hardware, PLENTY)
    values = [written(trace, op) for op in range(6)]
    firsts = [trace.values[value].first_read or 0 for value in values]
    light = Recompute((3,), firsts[3])
    long = Recompute((1, 2), firsts[2])
    replays = {values[3]: light, values[2]: long}
    assert heavy(case, replays, (), firsts[2], 1) == {values[2]}
    # What another starts from is back early on its account, until it is read itself.
    gone = {values[2]: firsts[2], values[0]: firsts[0]}
    assert heavy(case, replays, gone, firsts[3], 1) == {values[3]}
    assert heavy(case, replays, gone, firsts[2] + 1, 1) == {values[2]}
    assert heavy(case, {}, gone, firsts[3], 1) == set()
    # As many as take what is lacking, and no more of them.
    both = {values[3]: light, values[4]: Recompute((1, 2, 3, 4), firsts[4])}
    assert len(heavy(case, both, gone, firsts[3], 1)) == 1
    assert heavy(case, both, gone, firsts[3], 2**40) == {*both}
