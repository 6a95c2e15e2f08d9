"""Which of the plans that were measured stays."""

from __future__ import annotations

import math

import pytest

from belady.ir.plan import Budget
from belady.ir.timeline import Measured, TierPeak
from belady.ir.trace import Tier
from belady.measure.trial import Trial, best, fastest
from belady.planners import plan
from tests.unit.simulate.cases import gpu, trace_of

BUDGET = Budget(10_000)
PLAN = plan("baseline", trace_of([1.0] * 2, []), gpu(), BUDGET)


def tried(seconds: float, flushes: int = 0, reserved: int = 0) -> Trial:
    measured = Measured(
        1, seconds, (seconds,), (TierPeak(Tier.DEVICE, 1),), reserved, allocation_retries=flushes
    )
    return Trial(PLAN, gpu(), "baseline", measured)


@pytest.mark.parametrize(("flushing", "stays"), [(0.6, True), (0.7, False), (1.1, False)])
def test_a_plan_with_flushes_stays_where_it_is_clearly_faster(flushing: float, stays: bool) -> None:
    calm, flushes = tried(1.0), tried(flushing, flushes=3)
    for order in ([calm, flushes], [flushes, calm]):
        assert best(order) is (flushes if stays else calm)
        assert fastest(order) == pytest.approx(min(1.0, 1.5 * flushing))


def test_what_is_over_the_budget_stays_only_where_nothing_keeps_to_it() -> None:
    over, flushes, unknown = tried(1.0, reserved=10_001), tried(9.0, 1), Trial(PLAN, gpu(), "floor")
    assert best([over, flushes, unknown]) is flushes
    assert best([unknown, over]) is over
    assert fastest([over, unknown]) == math.inf
    assert best([unknown]) is unknown
