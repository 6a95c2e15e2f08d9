"""What an iteration did or is predicted to do: the same quantities, so that they subtract."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from belady.ir.ops import Phase
from belady.ir.trace import Tier


class Lane(StrEnum):
    """What carries work in time order."""

    HOST = "host"
    COMPUTE = "compute"
    COPY_OUT = "copy-out"
    COPY_IN = "copy-in"
    DISK_WRITE = "disk-write"
    DISK_READ = "disk-read"


class Cause(StrEnum):
    """Why the compute lane waited."""

    COPY_OUT = "copy-out"
    COPY_IN = "copy-in"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Span:
    """Work on a lane, from ``start_s`` to ``end_s`` seconds after the iteration began.

    ``op`` is the op run or waited for, ``value`` the value copied; -1 where there is none.
    """

    lane: Lane
    start_s: float
    end_s: float
    op: int = -1
    value: int = -1


@dataclass(frozen=True, slots=True)
class Stall:
    """Time that compute waited before op ``op``; ``value`` is -1 when the host was late.

    It lies where compute was idle, from ``start_s`` seconds after the iteration began.
    """

    cause: Cause
    op: int
    value: int
    seconds: float
    start_s: float = 0.0

    @property
    def end_s(self) -> float:
        """Seconds from the beginning of the iteration to the end of the wait."""
        return self.start_s + self.seconds


@dataclass(frozen=True, slots=True)
class TierPeak:
    """Most bytes held in a tier at once."""

    tier: Tier
    nbytes: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes carried by a lane."""

    lane: Lane
    nbytes: int
    copies: int


@dataclass(frozen=True, slots=True)
class Held:
    """Device bytes allocated when the host came to ``boundary``, ``seconds`` after it began."""

    boundary: int
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of an iteration spent in one phase."""

    phase: Phase
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """A predicted iteration.

    Attributes
    ----------
    compute_seconds
        Sum of kernel time, replays excluded.
    curve
        Device bytes held during each op, allocator rounding and workspace included.
    peak_op
        Index of the op at the device peak.
    spans
        Work on every lane in order of start.
    replay_seconds
        Sum of kernel time of the ops that are run again. With the stalls it is the overhead.
    """

    seconds: float
    compute_seconds: float
    peaks: tuple[TierPeak, ...]
    peak_op: int
    moved: tuple[Moved, ...] = ()
    stalls: tuple[Stall, ...] = ()
    curve: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    replay_seconds: float = 0.0
    version: int = field(default=1, metadata={"const": 1})

    @property
    def stall_seconds(self) -> float:
        """Time that compute waited for copies (waiting for the host is not a stall)."""
        return sum(stall.seconds for stall in self.stalls if stall.cause is not Cause.HOST)

    def peak(self, tier: Tier) -> int:
        """Most bytes held in ``tier``."""
        return next((p.nbytes for p in self.peaks if p.tier is tier), 0)


@dataclass(frozen=True)
class Measured:
    """Measured iterations under one plan.

    Attributes
    ----------
    level
        0: time and peaks alone (free); 1: bytes and stalls too; 2: every event of one more
        iteration, in ``spans``, ``stalls`` and ``held``.
    iterations
        Durations in seconds, one each; ``seconds`` is their median.
    peaks
        Bytes allocated per tier; HOST and DISK count what our stores hold.
    reserved_bytes
        Device bytes reserved by torch's allocator, 0 where there is none.
    allocation_retries
        Times that the allocator had to flush its cache to go on.
    defaults
        Saves that did not match the plan and got the safe default, by reason.
    spans, stalls, held
        Copies on every lane, waits of compute, and device bytes at each anchor, of the recorded
        iteration (level 2), whose seconds start at its beginning on the device.
    numbers
        Which iterations of the program ``iterations`` are, the first being 1; empty where nobody
        counted.
    recorded, recorded_seconds
        Which iteration was recorded, and its duration; 0 where none was.
    phases
        Medians of what FORWARD took, BACKWARD and OPTIMIZER; empty where nobody could tell them
        apart. What lies between forward and backward, such as a loss, counts to BACKWARD, and to
        FORWARD where graphs were captured.
    launched
        Whether they were launched as they were captured: nobody sees them wait then, and
        ``stall_seconds`` is 0. What was recorded was issued all the same.
    """

    level: int
    seconds: float
    iterations: tuple[float, ...]
    peaks: tuple[TierPeak, ...]
    reserved_bytes: int = 0
    stall_seconds: float = 0.0
    moved: tuple[Moved, ...] = ()
    allocation_retries: int = 0
    defaults: tuple[tuple[str, int], ...] = ()
    spans: tuple[Span, ...] = ()
    stalls: tuple[Stall, ...] = ()
    held: tuple[Held, ...] = ()
    numbers: tuple[int, ...] = ()
    recorded: int = 0
    recorded_seconds: float = 0.0
    phases: tuple[Took, ...] = ()
    launched: bool = False
    version: int = field(default=1, metadata={"const": 1})

    def peak(self, tier: Tier) -> int:
        """Most bytes held in ``tier``."""
        return next((p.nbytes for p in self.peaks if p.tier is tier), 0)
