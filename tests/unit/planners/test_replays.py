"""The cheapest replay of a value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.ir.plan import Recompute
from belady.ir.replay import closure
from belady.ir.trace import Trace
from belady.planners.replays import LONGEST, cheapest
from tests.support.builder import OpSpec, build_trace
from tests.unit.planners.nets import written_by

CONV = OpSpec()
NORM = OpSpec(replayable=True)
RELU = OpSpec(replayable=True, in_place=True, saves_input=False, saves_output=True)
QUIET = OpSpec(replayable=True, saves_input=False)


def again(trace: Trace, op: int, *dropped: int) -> Recompute | None:
    """Replay of what op ``op`` writes if nothing may start from what ops ``dropped`` write."""
    gone = {written_by(trace, other) for other in dropped}
    return cheapest(trace, written_by(trace, op), lambda value: value not in gone)


def test_it_starts_from_the_nearest_saved_values() -> None:
    trace = build_trace([CONV, NORM, RELU, CONV, NORM, RELU, CONV, CONV])
    at = trace.values[written_by(trace, 5)].first_read
    assert at is not None
    assert again(trace, 5) == Recompute((4, 5), at)
    assert again(trace, 3) is None


def test_it_goes_further_back_where_a_value_is_gone() -> None:
    trace = build_trace([CONV, NORM, NORM, NORM, CONV, CONV])
    found = [again(trace, 3, *gone) for gone in ((), (2,), (2, 1))]
    assert [it.ops for it in found if it] == [(3,), (2, 3), (1, 2, 3)]
    # The convolution cannot run again.
    assert again(trace, 3, 2, 1, 0) is None


def test_what_joins_is_replayed_once() -> None:
    join = replace(QUIET, branch=1, join=True)
    trace = build_trace([CONV, NORM, QUIET, join, CONV, CONV])
    found = again(trace, 3)
    assert found is not None
    assert found.ops == (1, 2, 3)


@pytest.mark.parametrize("extra", [0, 1])
def test_a_long_replay_is_none(extra: int) -> None:
    trace = build_trace([CONV, NORM, *[QUIET] * (LONGEST - 1 + extra), CONV, CONV])
    value = written_by(trace, LONGEST + extra)
    found = cheapest(trace, value)
    if extra:
        assert found is None
        found = closure(trace, value, lambda _: True, LONGEST + 1)
    assert found is not None
    assert found.ops == tuple(range(1, LONGEST + 1 + extra))


def test_what_backward_never_reads_has_none() -> None:
    trace = build_trace([CONV, NORM, replace(CONV, asked=False), CONV])
    assert again(trace, 1) is None
