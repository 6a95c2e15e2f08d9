"""How long iterations take and what they hold, at a stated price.

Level 0 takes two events an iteration and is on always. Level 1 also resets the allocator's peak
statistics at the start of an iteration and times every wait; it is on while a plan is verified.
Level 2 also takes down every copy, wait and anchor; it is on for an iteration when asked for, waits
for the device first and takes some microseconds an anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

from belady.ir.timeline import Measured, Moved, TierPeak
from belady.ir.trace import Tier
from belady.memory.carrier import Carrier
from belady.memory.tape import END, Tape


@dataclass(slots=True)
class Sample:
    """One iteration: device events or host times at its ends, and its counts at level 1.

    ``number`` says which of the program it was, the first being 1.
    ``host_seconds`` is what the host spent inside the roots on the program's own account, and
    ``engine_seconds`` what issuing the plan took it in all, ``replay_seconds`` of them to take over
    what stays on the device or is made again; 0 where nobody counts it.
    """

    begun: torch.cuda.Event | float
    ended: torch.cuda.Event | float | None = None
    peaks: tuple[TierPeak, ...] = ()
    reserved_bytes: int = 0
    retries: int = 0
    stall_seconds: float = 0.0
    moved: tuple[Moved, ...] = ()
    host_seconds: float = 0.0
    engine_seconds: float = 0.0
    replay_seconds: float = 0.0
    tape: Tape | None = None
    number: int = 0

    @property
    def seconds(self) -> float:
        """Duration; waits for the device where it must."""
        if isinstance(self.begun, float):
            return self.ended - self.begun if isinstance(self.ended, float) else 0.0
        if not isinstance(self.ended, torch.cuda.Event):
            return 0.0
        self.ended.synchronize()
        return float(self.begun.elapsed_time(self.ended)) / 1e3


@dataclass(slots=True)
class Monitor:
    """Measures the iterations of one device."""

    device: torch.device
    carrier: Carrier
    _retries: int = 0
    _level: int = field(default=0)

    def begin(self, level: int) -> Sample:
        """An iteration begins."""
        self._level = level
        tape = self.carrier.record() if level == 2 else None
        if level:
            self.carrier.measure_stalls = True
            self.carrier.reset_counters()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
                self._retries = _retries(self.device)
        return Sample(self._now(), tape=tape)

    def end(self, sample: Sample) -> Sample:
        """It ended."""
        sample.ended = self._now()
        self.carrier.iterations += 1
        sample.number = self.carrier.iterations
        if sample.tape is not None:
            sample.tape.anchor(END)
        self.carrier.stop_recording()
        if self._level:
            self._count(sample)
            self.carrier.measure_stalls = self.device.type != "cuda"
        return sample

    def cancel(self) -> None:
        """The iteration came to nothing: stop timing waits."""
        self.carrier.stop_recording()
        self.carrier.measure_stalls = self.device.type != "cuda"

    def _count(self, sample: Sample) -> None:
        carrier = self.carrier
        device_peak = 0
        if self.device.type == "cuda":
            # torch's allocator does not see managed blocks, of which the budget knows.
            managed = carrier.paging.peak_here_bytes
            device_peak = torch.cuda.max_memory_allocated(self.device) + managed
            sample.reserved_bytes = torch.cuda.max_memory_reserved(self.device) + managed
            sample.retries = _retries(self.device) - self._retries
        sample.peaks = (
            TierPeak(Tier.DEVICE, device_peak),
            TierPeak(Tier.HOST, carrier.peak_host_bytes),
            TierPeak(Tier.DISK, carrier.peak_disk_bytes),
        )
        sample.stall_seconds = sum(carrier.collect_stalls().values())
        sample.moved = tuple(m for m in carrier.counters.values() if m.copies)

    def _now(self) -> torch.cuda.Event | float:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device.index))
        return event


def summarize(
    samples: Sequence[Sample], device_peak: int, defaults: tuple[tuple[str, int], ...]
) -> Measured:
    """Make one document of verified iterations.

    Parameters
    ----------
    samples
        Level-1 samples, at least one.
    device_peak
        Device bytes held at the peak where the samples do not know it (CPU), else 0.
    defaults
        Saves that got the safe default, by reason.
    """
    seconds = tuple(sample.seconds for sample in samples)
    last = samples[-1]
    peaks = {p.tier: p.nbytes for sample in samples for p in sample.peaks}
    for sample in samples:
        for p in sample.peaks:
            peaks[p.tier] = max(peaks[p.tier], p.nbytes)
    peaks[Tier.DEVICE] = max(peaks.get(Tier.DEVICE, 0), device_peak)
    return Measured(
        1,
        median(seconds),
        seconds,
        tuple(TierPeak(tier, nbytes) for tier, nbytes in peaks.items()),
        max(sample.reserved_bytes for sample in samples),
        median(sample.stall_seconds for sample in samples),
        last.moved,
        sum(sample.retries for sample in samples),
        defaults,
        numbers=tuple(sample.number for sample in samples),
    )


def _retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
