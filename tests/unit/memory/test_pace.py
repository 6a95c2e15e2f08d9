"""Seconds between boundaries, from ticks of a clock that is read by hand."""

from __future__ import annotations

from typing import cast

from belady.measure.monitor import Sample
from belady.memory.lanes import Lanes
from belady.memory.pace import Pace


class Clock:
    """Lanes whose ticks are what the test says that it is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.holds: list[float] = []

    def hold(self, seconds: float) -> None:
        self.now += seconds
        self.holds.append(seconds)

    def tick(self) -> object:
        return self.now

    def seconds(self, start: object, end: object) -> float:
        return cast(float, end) - cast(float, start)


def test_waits_are_no_part_of_what_ops_take() -> None:
    clock = Clock()
    pace = Pace(cast(Lanes, clock))
    assert pace.seconds() == {}
    # Before the engine says where it is, nothing is known.
    pace.waited((-2.0, -1.0))
    pace.anchor(2)
    assert pace.seconds() == {}
    clock.now = 5.0
    pace.waited((3.0, 4.5))
    pace.anchor(7)
    # Where control comes back to a boundary, or to one behind, others had it meanwhile.
    clock.now = 6.0
    pace.anchor(7)
    pace.anchor(3)
    clock.now = 8.0
    pace.waited((7.0, 8.0))
    pace.anchor(9)
    assert pace.seconds() == {(2, 7): 3.5, (7, 9): 1.0}


def test_a_device_that_is_held_back_is_as_fast_as_before() -> None:
    clock = Clock()
    pace = Pace(cast(Lanes, clock))
    pace.anchor(0)
    pace.hold(4.0)
    clock.now += 1.0
    pace.anchor(3)
    assert clock.now == 5.0
    assert pace.seconds() == {(0, 3): 1.0}


def test_only_what_is_to_be_held_back_is() -> None:
    clock = Clock()
    sample = Sample(0.0, pace=Pace(cast(Lanes, clock)))
    for held in (sample, Sample(0.0)):
        held.hold(0.0)
        assert not held.held
    Sample(0.0).hold(2.0)
    assert clock.holds == []
    sample.hold(2.0)
    assert sample.held
    assert clock.holds == [2.0]
