"""Seconds between boundaries, from ticks of a clock that is read by hand."""

from __future__ import annotations

from typing import cast

import pytest

from belady.measure.monitor import Sample
from belady.memory import pace as pacing
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
    pace.hold(4.0, range(5))
    clock.now += 1.0
    pace.anchor(3)
    assert clock.now == 5.0
    assert pace.seconds() == {(0, 3): 1.0}


def test_only_what_is_to_be_held_back_is() -> None:
    clock = Clock()
    sample = Sample(0.0, pace=Pace(cast(Lanes, clock)))
    for held in (sample, Sample(0.0)):
        held.hold(0.0, range(3))
        assert not held.held
    Sample(0.0).hold(2.0, range(3))
    assert clock.holds == []
    sample.hold(2.0, range(3))
    assert sample.held
    assert clock.holds == [2.0]


class Queue:
    """Lanes of a device whose launch queue has room for so many; a host that is slower than it."""

    ROOM = 1000

    def __init__(self) -> None:
        self.now = 0.0
        self.ends = [0.0]

    def launch(self, seconds: float, host_seconds: float = 0.0) -> None:
        self.now += host_seconds
        if len(self.ends) > self.ROOM:
            self.now = max(self.now, self.ends[-self.ROOM])
        self.ends.append(max(self.now, self.ends[-1]) + seconds)

    def hold(self, seconds: float) -> None:
        self.now = max(self.now, self.ends[-1])
        self.launch(seconds)

    def tick(self) -> object:
        return max(self.now, self.ends[-1])

    def seconds(self, start: object, end: object) -> float:
        return cast(float, end) - cast(float, start)


@pytest.mark.parametrize("ops", [150, 400, 2000])
@pytest.mark.parametrize("every", [1, 70])
def test_a_host_stays_ahead_of_any_number_of_ops(
    ops: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, issue, launches = 10e-6, 40e-6, 3

    def off() -> float:
        lanes = Queue()
        pace = Pace(cast(Lanes, lanes))
        pace.hold(ops * launches * issue, range(100, 100 + ops))
        for op in range(100, 100 + ops):
            if (op - 100) % every == 0:
                pace.anchor(op)
            for _ in range(launches):
                lanes.launch(kernel, issue)
        pace.anchor(100 + ops)
        # All but once have been held back for no longer than the host has issued.
        assert lanes.tick() <= 2 * ops * launches * (issue + kernel)
        return sum(pace.seconds().values()) / (ops * launches * kernel)

    assert off() == pytest.approx(1.0, rel=0.01)
    monkeypatch.setattr(pacing, "_OPS_AHEAD", 1_000_000)
    # Held back once, it catches up with the host.
    assert (off() > 1.2) == (ops == 2000)


def test_what_comes_after_is_not_held_back() -> None:
    clock = Clock()
    pace = Pace(cast(Lanes, clock))
    pace.hold(1.0, range(1000))
    for boundary in (0, 199, 200, 399, 400, 999, 1000, 1400):
        pace.anchor(boundary)
    # For twice the share of those that go ahead.
    assert clock.holds == pytest.approx([0.4] * 4)


@pytest.mark.parametrize("ops", [190, 405, 450, 601, 1001])
def test_a_host_that_is_late_at_the_end_is_ahead_all_the_same(ops: int) -> None:
    """As the loss, of which a host issues many ops, counts as one."""
    lanes, issue, loss = Queue(), 20e-6, 500e-6
    pace = Pace(cast(Lanes, lanes))
    pace.hold(ops * issue + loss, range(ops + 1))
    for op in range(ops):
        pace.anchor(op)
        lanes.launch(5e-6, issue)
    pace.anchor(ops)
    lanes.launch(50e-6, loss)
    pace.anchor(ops + 1)
    assert pace.seconds()[ops, ops + 1] == pytest.approx(50e-6)
