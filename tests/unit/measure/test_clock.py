"""The clock of kernels: what the host does in an op is no kernel's time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter, sleep

import pytest
import torch

from belady.measure import clock as clocks
from belady.measure.clock import CudaClock, clock_for

MIB = 2**20
HELD = 20e-3


class Event:
    """On a device that does what it is told in order, for as long as kernels take."""

    busy_until = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = max(perf_counter(), Event.busy_until)

    @staticmethod
    def kernel(seconds: float) -> None:
        Event.busy_until = max(perf_counter(), Event.busy_until) + seconds

    @staticmethod
    def wait() -> None:
        sleep(max(0.0, Event.busy_until - perf_counter()))

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counters of the allocator, to be changed by a test."""
    found = {"num_alloc_retries": 3, "peak": 7 * MIB, "current": 5 * MIB}

    def nested(device: torch.device) -> dict[str, object]:
        return {"num_alloc_retries": found["num_alloc_retries"], "allocated_bytes": {"all": found}}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", nested)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("synchronize", "reset_peak_memory_stats", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    return found


@pytest.mark.parametrize("flushes", [0, 1, 4])
def test_an_op_that_flushes_is_counted_without_the_flush(
    stats: dict[str, int], flushes: int
) -> None:
    clock = CudaClock(torch.device("cuda"))
    for retries in (0, flushes, 0):
        clock.start()
        sleep(HELD)
        stats["num_alloc_retries"] += retries
        clock.stop()
    (before, _), (flushed, workspace), (after, _) = clock.results()
    assert workspace == 2 * MIB
    # Two events behind one another are some microseconds apart, which are taken off.
    assert min(before, after) >= 0.9 * HELD
    assert flushed < HELD / 4 if flushes else flushed >= 0.9 * HELD


def test_a_flush_waits_for_all_that_was_issued_before(stats: dict[str, int]) -> None:
    clock = CudaClock(torch.device("cuda"))
    for flushes in (False, False, True, False):
        clock.start()
        if flushes:
            Event.wait()
            sleep(HELD)
            stats["num_alloc_retries"] += 1
        Event.kernel(HELD)
        clock.stop()
    seconds = [taken for taken, _ in clock.results()]
    assert seconds == pytest.approx([HELD] * 4, rel=0.25)


@pytest.fixture
def now(stats: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still unless a test changes it; spins take the device's."""
    now = [0.0]
    for module in (clocks, sys.modules[__name__]):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Event, "busy_until", 0.0)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: Event.kernel(cycles / 2e9))
    return now


def test_what_the_host_takes_to_issue_an_op_is_no_kernels_time(now: list[float]) -> None:
    clock = CudaClock(torch.device("cuda"))
    for host in (20e-6, 150e-6, 250e-6):
        clock.start()
        now[0] += host
        Event.kernel(5e-6)
        clock.stop()
        now[0] += 1e-3
    assert [taken for taken, _ in clock.results()] == pytest.approx([5e-6] * 3)


def test_what_events_show_with_nothing_between_them_is_not_the_ops(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Event.record

    def slowly(event: Event) -> None:
        Event.kernel(3e-6)
        record(event)

    monkeypatch.setattr(Event, "record", slowly)
    clock = CudaClock(torch.device("cuda"))
    for seconds in (0.0, 4e-6, 5e-4):
        clock.start()
        Event.kernel(seconds)
        clock.stop()
    assert [taken for taken, _ in clock.results()] == pytest.approx([0.0, 4e-6, 5e-4], abs=1e-9)


@contextmanager
def scattered() -> Iterator[None]:
    """Hold half of what may be reserved, in blocks that do not lie beside one another."""
    torch.cuda.empty_cache()
    blocks = [torch.empty(32 * MIB, dtype=torch.uint8, device="cuda") for _ in range(64)]
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + MIB) / total)
    del blocks[::2]
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_kernels_are_told_from_what_the_host_takes_to_issue_them() -> None:
    clock = clock_for(torch.device("cuda"))
    host = []
    for _ in range(9):
        clock.start()
        begun = perf_counter()
        while perf_counter() < begun + 200e-6:
            pass
        torch.cuda._sleep(10**4)  # type: ignore[no-untyped-call]
        host.append(perf_counter() - begun)
        clock.stop()
    kernels = [taken for taken, _ in clock.results()]
    assert median(kernels) < median(host) / 4


@pytest.mark.gpu
def test_what_launches_nothing_takes_nothing() -> None:
    clock, matrix = clock_for(torch.device("cuda")), torch.zeros(8, 8, device="cuda")
    for _ in range(200):
        clock.start()
        matrix.t()
        clock.stop()
    assert median(taken for taken, _ in clock.results()) < 1e-6


@pytest.mark.gpu
def test_kernels_keep_their_time_beside_a_flush() -> None:
    def timed() -> float:
        clock = clock_for(torch.device("cuda"))
        for _ in range(20):  # of which the flush waits for the last
            clock.start()
            torch.cuda._sleep(10**6)  # type: ignore[no-untyped-call]
            clock.stop()
        clock.start()
        torch.zeros(768 * MIB, dtype=torch.uint8, device="cuda")
        clock.stop()
        return clock.results()[-1][0]

    def flushed() -> float:
        with scattered():
            before = torch.cuda.memory_stats()["num_alloc_retries"]
            seconds = timed()
            assert torch.cuda.memory_stats()["num_alloc_retries"] > before
        return seconds

    # The least of several, as other processes may have the device in between: a flush that is
    # counted is counted each time.
    beside = min(flushed() for _ in range(5))
    kernel = min(timed() for _ in range(5))
    assert 0.1 * kernel - 1e-4 < beside < 3 * kernel + 1e-4
