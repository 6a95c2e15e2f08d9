"""What is begun with where the blocks of the first plan do not fit into one another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Assignment, Budget, Offload, Plan
from belady.ir.trace import Tier
from belady.measure.corrections import wider
from belady.measure.margins import suited
from belady.planners import plan
from tests.unit.simulate.cases import gpu, trace_of

TRACE = trace_of([1.0] * 2)
STATED = replace(gpu(), allocator=replace(gpu().allocator, margin_fraction=0.18))
ONCE = wider(STATED.allocator).margin_fraction
TWICE = wider(wider(STATED.allocator)).margin_fraction
PLAN = plan("baseline", TRACE, gpu(), Budget(10_000))


def begun(
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[float, float],
    lacks: float,
    fits: float,
    settled: int = 0,
) -> tuple[float, list[float]]:
    """The margin of what is begun with, and those that were asked for.

    Parameters
    ----------
    seconds
        Of plans by the largest margin that they are for; of wider ones there is none.
    lacks
        Part of the budget that blocks lack, with margins below ``fits``.
    """
    asked: list[float] = []

    def make(hardware: HardwareProfile) -> Plan:
        asked.append(margin := hardware.allocator.margin_fraction)
        found = next((it for most, it in seconds.items() if margin <= most), None)
        if found is None:
            raise InfeasibleBudgetError(
                needed_bytes=3, budget_bytes=1, smallest_bytes=4, op="op", module="module"
            )
        # Its name says the margin.
        return replace(PLAN, predicted_seconds=found, planner=str(margin))

    def excess(_trace: object, made: Plan, _allocator: object) -> float:
        return lacks if float(made.planner) < fits else -lacks

    monkeypatch.setattr("belady.measure.margins.excess", excess)
    allocator = replace(STATED.allocator, settled_bytes=settled)
    _, hardware = suited(TRACE, replace(STATED, allocator=allocator), make)
    return hardware.allocator.margin_fraction, asked


def test_the_least_margin_that_fits_is_begun_with(monkeypatch: pytest.MonkeyPatch) -> None:
    margin, asked = begun(monkeypatch, {9.0: 1.0}, lacks=0.01, fits=0.19)
    # A little more than what is lacking: one and a half times.
    assert margin == pytest.approx(1.18 * 1.015 - 1)
    assert asked == [0.18, margin]


def test_what_is_there_all_the_time_shrinks_by_no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    margin, _ = begun(monkeypatch, {9.0: 1.0}, lacks=0.01, fits=0.19, settled=5_000)
    assert margin == pytest.approx(1.18 * 1.03 - 1)


@pytest.mark.parametrize(
    ("slow", "least", "margin"),
    [
        (1.05**4, 1.0, ONCE),  # as slow as what lacks a twentieth counts as
        (1.05**4 + 0.01, 1.0, TWICE),  # too slow, but not what is even wider
        (1.05**4 + 0.01, 2.0, 0.18),  # neither
    ],
)
def test_a_plan_that_fits_is_not_begun_with_where_it_takes_longer_than_flushes(
    monkeypatch: pytest.MonkeyPatch, slow: float, least: float, margin: float
) -> None:
    seconds = {0.18: 1.0, ONCE: slow, TWICE: least}
    found, _ = begun(monkeypatch, seconds, lacks=0.05, fits=ONCE)
    assert found == pytest.approx(margin)


def test_where_there_is_no_plan_with_a_wider_margin_the_first_is_begun_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    margin, asked = begun(monkeypatch, {0.2: 1.0}, lacks=0.05, fits=0.5)
    assert margin == 0.18
    assert len(asked) == 2


MOVING = replace(PLAN, assignments=(Assignment(0, Offload(Tier.HOST, 1, 2, 5, 6)),))


@pytest.mark.parametrize(
    ("gains", "fits", "asked", "begun_with"),
    [
        # Half of the margin is worth it, and a quarter once more.
        ((0.9, 0.8), 0.0, [0.18, 0.09, 0.045], 0.045),
        # It does not fit: what lies between is tried.
        ((0.9, 0.95), 0.1, [0.18, 0.09, 0.135], 0.135),
        # What all of it gains is little, so a part of it is.
        ((0.999,), 0.0, [0.18, 0.09], 0.18),
        ((0.999,), 0.1, [0.18, 0.09], 0.18),
    ],
)
def test_smaller_margins_are_tried_as_long_as_they_gain(
    gains: tuple[float, ...],
    fits: float,
    asked: list[float],
    begun_with: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    margins: list[float] = []

    def make(hardware: HardwareProfile) -> Plan:
        margins.append(hardware.allocator.margin_fraction)
        return replace(MOVING, predicted_seconds=100 * (1.0, *gains)[len(margins) - 1])

    monkeypatch.setattr(
        "belady.measure.margins.fits",
        lambda _trace, _plan, machine: machine.allocator.margin_fraction >= fits,
    )
    _, hardware = suited(TRACE, STATED, make)
    assert margins == asked
    assert hardware.allocator.margin_fraction == begun_with
