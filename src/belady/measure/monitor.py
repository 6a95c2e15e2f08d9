"""How long iterations take and what they hold, at a stated price.

Level 0 takes two events an iteration, asks the allocator at both ends how often it has flushed its
cache, and is on always. Level 1 also resets the allocator's peak
statistics at the start of an iteration, times every wait and, where hooks are off otherwise, every
save behind them, and takes an event where a phase begins, two more in an iteration of one pass, in
one of graphs also at each boundary that is passed; it is on while a plan is verified.
Level 2 also takes down every copy, wait and anchor; it is on for an iteration when asked for, waits
for the device first and takes some microseconds an anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

from belady.ir.ops import Phase
from belady.ir.timeline import Measured, Moved, TierPeak, Took
from belady.ir.trace import Tier
from belady.memory.carrier import Carrier
from belady.memory.pace import Pace
from belady.memory.tape import END, Tape

Moment = torch.cuda.Event | float
# Passes of an iteration whose phases are told apart; a root called without end is not timed.
_MOST_MARKS = 64


@dataclass(slots=True)
class Sample:
    """One iteration: device events or host times at its ends, and its counts at level 1.

    ``number`` says which of the program it was, the first being 1. ``waits`` and ``paces`` give
    ``stall_seconds`` and ``paced``, once the device has passed what they need: nobody is to wait
    for it as an iteration ends.
    ``host_seconds`` is what the host spent inside the roots on the program's own account, and
    ``engine_seconds`` what issuing the plan took it in all, ``replay_seconds`` of them to take over
    what stays on the device or is made again; 0 where nobody counts it. ``hook_seconds`` is what
    hooks took beside, in forward, where they are off during calls that need none.
    ``marks`` says when which phase began, after the FORWARD of ``begun``; ``now`` is the clock for
    them, None where they are not taken.
    ``paced`` has the seconds of the ops between two boundaries, without waits, where an engine had
    a ``pace`` taken. ``held`` says whether the device was held back meanwhile, so that the host was
    ahead of it and nothing in ``paced`` waits for the host.
    ``beside_bytes`` is what was held at most after it and before the next one, beyond what was held
    at its end, and ``outside_bytes`` the same outside of optimizers' steps; ``stepping_bytes`` is
    what such a step took beyond what was held when it began. 0 where nobody counts it.
    """

    begun: Moment
    ended: Moment | None = None
    peaks: tuple[TierPeak, ...] = ()
    reserved_bytes: int = 0
    retries: int = 0
    waits: Callable[[], float] = float
    moved: tuple[Moved, ...] = ()
    host_seconds: float = 0.0
    engine_seconds: float = 0.0
    replay_seconds: float = 0.0
    hook_seconds: float = 0.0
    tape: Tape | None = None
    number: int = 0
    marks: list[tuple[Phase, Moment]] = field(default_factory=list)
    now: Callable[[], Moment] | None = None
    pace: Pace | None = None
    paces: Callable[[], dict[tuple[int, int], float]] = dict
    held: bool = False
    beside_bytes: int = 0
    outside_bytes: int = 0
    stepping_bytes: int = 0

    def passed(self, boundary: int) -> None:
        """The engine got control at a boundary."""
        for events in (self.tape, self.pace):
            if events is not None:
                events.anchor(boundary)

    def hold(self, seconds: float, ops: range) -> None:
        """Hold the device back for what the host takes for ``ops``, where a pace is to be taken."""
        if self.pace is not None and seconds > 0:
            self.pace.hold(seconds, ops)
            self.held = True

    def mark(self, phase: Phase) -> None:
        """A phase begins, if it is another than the one under way."""
        under_way = self.marks[-1][0] if self.marks else Phase.FORWARD
        if self.now is not None and phase is not under_way and len(self.marks) < _MOST_MARKS:
            self.marks.append((phase, self.now()))

    @property
    def stall_seconds(self) -> float:
        """What computation waited for copies; waits for the device where it must."""
        waited = self.waits()
        self.waits = lambda: waited
        return waited

    @property
    def paced(self) -> dict[tuple[int, int], float]:
        """Seconds between boundaries; waits for the device where it must."""
        paced = self.paces()
        self.paces = lambda: paced
        return paced

    @property
    def seconds(self) -> float:
        """Duration; waits for the device where it must."""
        if isinstance(self.ended, torch.cuda.Event):
            self.ended.synchronize()
        return _between(self.begun, self.ended)

    @property
    def phases(self) -> dict[Phase, float]:
        """Seconds of each phase; empty where they were not told apart. Waits as `seconds`."""
        known = [phase for phase, _ in self.marks[:1]] == [Phase.BACKWARD]
        if not known or len(self.marks) >= _MOST_MARKS:
            return {}
        if isinstance(self.ended, torch.cuda.Event):
            self.ended.synchronize()
        took: dict[Phase, float] = {}
        begins = [(Phase.FORWARD, self.begun), *self.marks]
        ends = [moment for _, moment in self.marks] + [self.ended]
        for (phase, begun), ended in zip(begins, ends, strict=True):
            took[phase] = took.get(phase, 0.0) + _between(begun, ended)
        return took


@dataclass(slots=True)
class Monitor:
    """Measures the iterations of one device."""

    device: torch.device
    carrier: Carrier
    _retries: int = 0
    _level: int = field(default=0)
    _at_end: int = 0
    _before_step: int = 0
    _last: Sample | None = None

    def begin(self, level: int, *, paced: bool = False) -> Sample:
        """An iteration begins; at level 1 its pace is taken, if the engine says where it is."""
        self._level, self._last = level, None
        tape = self.carrier.record() if level == 2 else None
        if level:
            self.carrier.measure_stalls = True
            self.carrier.reset_counters()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
        self._retries = _retries(self.device)
        pace = self.carrier.pace() if paced and level == 1 else None
        return Sample(self._now(), tape=tape, now=self._now if level else None, pace=pace)

    def end(self, sample: Sample) -> Sample:
        """It ended."""
        sample.ended, sample.now = self._now(), None
        self.carrier.iterations += 1
        sample.number = self.carrier.iterations
        if sample.tape is not None:
            sample.tape.anchor(END)
        self.carrier.stop_recording()
        sample.retries = _retries(self.device) - self._retries
        if self._level:
            self._count(sample)
            self.carrier.measure_stalls = self.device.type != "cuda"
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
                self._at_end = torch.cuda.memory_allocated(self.device)
                self._last = sample
        return sample

    def step_begins(self) -> None:
        """An optimizer's step begins."""
        if self._last is not None:
            self.after()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before_step = torch.cuda.memory_allocated(self.device)

    def step_ended(self) -> None:
        """It ended."""
        last = self._last
        if last is not None:
            peak = torch.cuda.max_memory_allocated(self.device)
            last.stepping_bytes = max(last.stepping_bytes, peak - self._before_step)
            last.beside_bytes = max(last.beside_bytes, peak - self._at_end)
            torch.cuda.reset_peak_memory_stats(self.device)

    def after(self) -> None:
        """What follows an iteration that has ended is over, too."""
        last = self._last
        if last is not None:
            took = torch.cuda.max_memory_allocated(self.device) - self._at_end
            last.outside_bytes = max(last.outside_bytes, took)
            last.beside_bytes = max(last.beside_bytes, took)

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
        sample.peaks = (
            TierPeak(Tier.DEVICE, device_peak),
            TierPeak(Tier.HOST, carrier.peak_host_bytes),
            TierPeak(Tier.DISK, carrier.peak_disk_bytes),
        )
        sample.waits = carrier.waits()
        sample.moved = tuple(m for m in carrier.counters.values() if m.copies)
        if sample.pace is not None:
            sample.paces, sample.pace = sample.pace.seconds, None

    def _now(self) -> Moment:
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
        phases=_phases([sample.phases for sample in samples]),
    )


def _phases(samples: Sequence[dict[Phase, float]]) -> tuple[Took, ...]:
    """The median of each phase that all samples have."""
    shared = [phase for phase in samples[0] if all(phase in sample for sample in samples)]
    return tuple(Took(phase, median(sample[phase] for sample in samples)) for phase in shared)


def _between(begun: Moment, ended: Moment | None) -> float:
    """Seconds between two moments of one kind that have passed."""
    if isinstance(begun, float):
        return ended - begun if isinstance(ended, float) else 0.0
    if not isinstance(ended, torch.cuda.Event):
        return 0.0
    return float(begun.elapsed_time(ended)) / 1e3


def _retries(device: torch.device) -> int:
    """How often torch's allocator has flushed its cache; `memory_stats` would take longer."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))
