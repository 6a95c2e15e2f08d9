"""How often iterations are timed, and what of them is told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import measure


class Played:
    """A session whose iterations take as long as told; the clock stands still otherwise."""

    device = "cpu"

    def __init__(self, *seconds: float) -> None:
        self.now, self.counts = 0.0, list[int]()
        self._seconds = seconds
        self.work = SimpleNamespace(setting=SimpleNamespace(device=self.device))

    def iterate(self, count: int) -> list[float]:
        done = sum(self.counts)
        took = [self._seconds[min(done + i, len(self._seconds) - 1)] for i in range(count)]
        self.counts.append(count)
        self.now += sum(took)
        return took

    def own_peak(self) -> int:
        return 7


def timed(
    monkeypatch: pytest.MonkeyPatch, repeats: int, *seconds: float, known: Sequence[float] = ()
) -> tuple[Played, Any]:
    session = Played(*seconds)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: session.now))
    return session, measure.timed(session, repeats, known)  # type: ignore[arg-type]


def test_a_slow_phase_of_the_host_is_not_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    session, record = timed(monkeypatch, 2, 2.5, 2.5, 2.5, 1.0)
    assert session.counts == [1, 1, 2] * 2
    assert record["seconds"] == [2.5, 2.5, 1.0, 1.0]
    assert record["rows"] == [1.75, 1.0]
    assert len(record["host_loop_seconds"]) == 3
    session, record = timed(monkeypatch, 2, 0.3, 0.3, 0.3, 0.3, 0.1)
    assert session.counts == [1, 1, 2] * 3
    assert record["median_seconds"] == pytest.approx(0.1)
    assert record["pipelined_seconds"] == pytest.approx(0.1)
    assert record["rows"] == pytest.approx([0.3, 0.1, 0.1])
    assert len(record["losses"]) == 12
    assert record["peak_allocated_bytes"] == 7


def test_long_iterations_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session, record = timed(monkeypatch, 2, 5.0)
    assert session.counts == [1, 1, 2]
    assert (record["median_seconds"], record["rows"]) == (5.0, [5.0])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions are of one, without an allocator that could be asked."""
    monkeypatch.setattr(measure, "_reset", lambda: 0)
    monkeypatch.setattr(measure, "_of_allocator", lambda before: {})
    monkeypatch.setattr(Played, "device", "cuda")


@pytest.mark.usefixtures("device")
def test_a_turn_waits_for_a_host_that_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [1.3, 1.25, 1.5, 1.3, 1.1, 1.0, 9.0]
    paces = iter(told)
    monkeypatch.setattr(measure, "pace", lambda: next(paces))
    session, record = timed(monkeypatch, 2, 0.7, 0.5, 0.5, 0.5, 0.5, 0.7, 0.7, 0.5, known=[1.0])
    # One iteration that is not counted before the first turn, and two before the second.
    assert session.counts == [1, 1, 1, 2, 1, 1, 1, 1, 2, 1, 1, 2]
    assert record["seconds"] == [0.5] * 6
    assert record["host_loop_seconds"] == told


@pytest.mark.usefixtures("device")
def test_it_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "pace", lambda: 2.0)
    session, record = timed(monkeypatch, 1, 1.5, known=[1.0])
    assert session.counts == [1, 1, 1, 1] * 2
    assert record["seconds"] == [1.5] * 2
    assert record["host_loop_seconds"] == [2.0] * 7


def test_what_the_host_computes_itself_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "pace", lambda: 2.0)
    session, _ = timed(monkeypatch, 1, 6.0, known=[1.0])
    assert session.counts == [1, 1]


def test_the_pace_is_that_of_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_LOOPS", 1000)
    few = min(measure.pace() for _ in range(20))
    monkeypatch.setattr(measure, "_LOOPS", 100_000)
    assert min(measure.pace() for _ in range(5)) > 10 * few > 0
