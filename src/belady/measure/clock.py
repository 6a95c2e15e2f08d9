"""How long each op takes while it is observed, and the scratch bytes it takes meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch

# A kernel that only spins. Long enough for the host to issue the bracketed op meanwhile, so that
# the two events enclose kernels alone and no launch gap: 6e5 cycles are 300 µs at 2 GHz. Behind
# 50 µs, convolutions of 24 µs (torch.profiler, H200) looked like 162: that host took 80 to issue
# one unwatched, and 140 for its backward.
_SPIN_CYCLES = 600_000
# The host runs ahead of spins and copies until the launch queue (1,024 entries) is full; then it
# would count its waiting as work. So it waits here, where nothing is counted, every so many ops.
_OPS_AHEAD = 64


class Clock(Protocol):
    """Brackets every op of one observed iteration."""

    def start(self) -> None:
        """Call just before an op."""

    def stop(self) -> None:
        """Call just after it."""

    @property
    def workspace(self) -> int:
        """Workspace bytes of the op bracketed last."""

    def results(self) -> list[tuple[float, int]]:
        """``(device seconds, workspace bytes)`` of every op; waits for the device."""


@dataclass(slots=True)
class NoClock:
    """For tracing without running: every op takes no time."""

    count: int = 0
    workspace: int = 0

    def start(self) -> None:
        """Count the op."""
        self.count += 1

    def stop(self) -> None:
        """Do nothing."""

    def results(self) -> list[tuple[float, int]]:
        """Give zeros."""
        return [(0.0, 0)] * self.count


@dataclass(slots=True)
class CpuClock:
    """On a CPU an op is over when its call returns; its scratch memory is not seen."""

    begun: float = 0.0
    seconds: list[float] = field(default_factory=list)
    workspace: int = 0

    def start(self) -> None:
        """Read the clock."""
        self.begun = perf_counter()

    def stop(self) -> None:
        """Read it again."""
        self.seconds.append(perf_counter() - self.begun)

    def results(self) -> list[tuple[float, int]]:
        """Seconds of every op, no workspace."""
        return [(seconds, 0) for seconds in self.seconds]


class CudaClock:
    """Kernel time by events behind a spinning kernel, workspace by the allocator's peak.

    What two events show with nothing between them is not the op's.
    An op in which the allocator flushes its cache lasts longer than the spin before it; what the
    host took for it is taken off again, as a plan with room for its blocks does not flush.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._workspaces: list[int] = []
        # Of an op that flushed: an event before it, and the host's time then and after the op.
        self._flushes: list[tuple[torch.cuda.Event, float, float] | None] = []
        self._before = 0
        self._waited = _event(), 0.0
        self._empty: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Put a spin and an event in the current stream and reset the allocator's peak."""
        if len(self._events) % _OPS_AHEAD == 0:
            torch.cuda.synchronize(self._device)
            self._waited = _event(), perf_counter()
            self._waited[0].record()
            self._empty.append(self._nothing())
        torch.cuda.reset_peak_memory_stats(self._device)
        begun, ended = _event(), _event()
        self._events.append((begun, ended))
        self._before = self._stats()["num_alloc_retries"]
        torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
        begun.record()

    def stop(self) -> None:
        """Put the second event; what the peak shows beyond what is left was scratch."""
        returned = perf_counter()
        self._events[-1][1].record()
        stats = self._stats()
        held = stats["allocated_bytes"]["all"]
        self._workspaces.append(held["peak"] - held["current"])
        flushed = stats["num_alloc_retries"] > self._before
        self._flushes.append((*self._waited, returned) if flushed else None)

    def _nothing(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Two events behind a spin, as around an op that launches nothing."""
        begun, ended = _event(), _event()
        torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
        begun.record()
        ended.record()
        return begun, ended

    def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats

    @property
    def workspace(self) -> int:
        """Of the last op, known as soon as it was issued."""
        return self._workspaces[-1]

    def results(self) -> list[tuple[float, int]]:
        """Wait for the device and read all events."""
        torch.cuda.synchronize(self._device)
        bracketed = zip(self._events, self._flushes, self._workspaces, strict=True)
        empty = min((_seconds(*ends) for ends in self._empty), default=0.0)
        return [
            (max(0.0, _seconds(begun, ended) - empty - _held_up(begun, flush)), workspace)
            for (begun, ended), flush, workspace in bracketed
        ]


def _seconds(one: torch.cuda.Event, other: torch.cuda.Event) -> float:
    milliseconds: float = one.elapsed_time(other)
    return milliseconds / 1e3


def _held_up(begun: torch.cuda.Event, flush: tuple[torch.cuda.Event, float, float] | None) -> float:
    """For how long the device waited, behind ``begun``, for a host that flushed.

    A flush waits for all that was issued before: the host's time up to ``begun`` is the device's.
    """
    if flush is None:
        return 0.0
    before, then, returned = flush
    return max(0.0, returned - then - _seconds(before, begun))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_for(device: torch.device) -> Clock:
    """Clock that brackets real ops on ``device``."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
