"""Which of the plans that were measured stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from belady.ir.plan import Budget
from belady.ir.timeline import Measured, TierPeak
from belady.ir.trace import Tier, Trace
from belady.measure.monitor import Sample
from belady.measure.progress import Progress
from belady.measure.stages import Policy, Stage
from belady.measure.trial import Trial, best, fastest
from belady.measure.verification import Verification
from belady.planners import plan
from tests.unit.simulate.cases import gpu, trace_of

BUDGET = Budget(10_000)
TRACE = trace_of([1.0] * 2, [])
PLAN = plan("baseline", TRACE, gpu(), BUDGET)


def tried(seconds: float, flushes: int = 0, reserved: int = 0) -> Trial:
    measured = Measured(
        1, seconds, (seconds,), (TierPeak(Tier.DEVICE, 1),), reserved, allocation_retries=flushes
    )
    # Each has a plan of its own.
    return Trial(replace(PLAN), gpu(), "baseline", measured)


@pytest.mark.parametrize(("flushing", "stays"), [(0.6, True), (0.7, False), (1.1, False)])
def test_a_plan_with_flushes_stays_where_it_is_clearly_faster(flushing: float, stays: bool) -> None:
    calm, flushes = tried(1.0), tried(flushing, flushes=3)
    for order in ([calm, flushes], [flushes, calm]):
        assert best(order) is (flushes if stays else calm)
        assert fastest(order) == pytest.approx(min(1.0, 1.5 * flushing))


def test_a_plan_is_as_fast_as_its_iteration_that_was_disturbed_least() -> None:
    # One iteration of the second waited for a busy host.
    one, other = tried(1.0), tried(1.2)
    assert other.measured is not None
    disturbed = replace(other, measured=replace(other.measured, iterations=(0.9, 1.5)))
    assert best([one, other]) is one
    assert best([one, disturbed]) is disturbed
    assert fastest([one, disturbed]) == 0.9


def test_what_is_over_the_budget_stays_only_where_nothing_keeps_to_it() -> None:
    over, flushes, unknown = tried(1.0, reserved=10_001), tried(9.0, 1), Trial(PLAN, gpu(), "floor")
    assert best([over, flushes, unknown]) is flushes
    assert best([unknown, over]) is over
    assert fastest([over, unknown]) == math.inf
    assert best([unknown]) is unknown


class Settled(Verification):
    """Knows one better plan than those that were tried, or none."""

    known: Trial | None = None

    def better(
        self, trace: Trace, tried: Sequence[Trial], samples: Sequence[Sample], *numerics: str
    ) -> tuple[Trace, Trial | None]:
        assert tried
        assert samples
        return trace, self.known


def concluded(before: Trial, better: Trial | None = None) -> tuple[Trial | None, list[str]]:
    """What goes on after a plan whose iterations took a second, and what is told."""
    verification = Settled(Policy("baseline", BUDGET), gpu())
    verification.known = better
    kind = Progress(Stage.VERIFYING, tried(0.0))
    kind.tried, kind.samples = [before], [Sample(0.0, 1.0)]
    _, chosen = kind.conclude(verification, TRACE, ())
    return chosen, verification.notes


@pytest.mark.parametrize("flushes", [0, 2])
def test_a_plan_that_goes_on_since_it_was_the_fastest_is_told(flushes: int) -> None:
    allocator = replace(gpu().allocator, margin_fraction=0.3)
    before = replace(tried(0.5, flushes), hardware=replace(gpu(), allocator=allocator))
    chosen, (note,) = concluded(before)
    assert chosen is before
    assert note.startswith("the plan under a margin of 30% was the fastest")
    assert ("flushes" in note) is bool(flushes)


def test_nothing_is_told_where_the_plan_in_force_is_the_fastest() -> None:
    assert concluded(tried(9.0)) == (None, [])


def test_nothing_of_the_kind_is_told_of_a_plan_that_is_tried_next() -> None:
    better = tried(0.1)
    assert concluded(tried(0.5), better) == (better, [])
