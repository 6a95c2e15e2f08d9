"""A plan that is tried: what it was made for, and what was measured under it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Plan
from belady.ir.timeline import Measured
from belady.ir.trace import Tier
from belady.memory.cap import SPARE_BYTES
from belady.simulate.holes import Holes
from belady.units import format_bytes

# Part of a budget up to which a plan needs nothing of the allocator.
_NEAR = 0.5
# What an iteration counts as in which the allocator flushed its cache: what is allocated beside it
# can make it flush more, or wait longer for that.
_FLUSHING = 1.5


@dataclass(frozen=True)
class Trial:
    """A plan, the machine as it was taken to be, and what was measured under it.

    Attributes
    ----------
    policy
        Who was asked for it, and is asked again.
    holes
        Bytes of the holes that its memory was divided into, see `belady.memory.piece`.
    """

    plan: Plan
    hardware: HardwareProfile
    policy: str
    measured: Measured | None = None
    holes: Holes = ()

    def room(self, peak_bytes: int, blocks_bytes: int) -> int:
        """Bytes that torch's allocator should hold in one piece for a plan with this peak.

        All that is needed, and what blocks are foretold to take: under a cap torch maps more at
        the end of a piece only where there is room for the whole of what is asked for, however much
        of it is free there. 0 where the budget is far above: only near its cap does torch have to
        fit blocks.
        """
        allocator, budget = self.hardware.allocator, self.plan.budget.device_bytes
        needed = replace(allocator, margin_bytes=0).budget_for(peak_bytes)
        if needed <= _NEAR * budget:
            return 0
        return min(max(needed, blocks_bytes) + allocator.margin_bytes, budget - SPARE_BYTES)

    def keeps(self) -> bool:
        """Whether what was measured kept to the budget."""
        m = self.measured
        return m is None or max(m.peak(Tier.DEVICE), m.reserved_bytes) <= (
            self.plan.budget.device_bytes
        )


def all_kept(trials: Iterable[Trial | None]) -> bool | None:
    """Whether all measured peaks kept to the budget; None before anything was verified."""
    done = [it.keeps() for it in trials if it and it.measured]
    return all(done) if done else None


def best(tried: Sequence[Trial]) -> Trial:
    """Of plans that kept to the budget the fastest; one with flushes counts as slower than it was.

    One that was not measured only if there is no other.
    """

    def preference(trial: Trial) -> tuple[bool, float]:
        measured = trial.measured
        return (True, math.inf) if measured is None else (not trial.keeps(), _counted(measured))

    return min(tried, key=preference)


def fastest(tried: Sequence[Trial]) -> float:
    """What `best` counts the fastest as that kept to the budget, in seconds; infinite if none."""
    found = (it.measured for it in tried if it.keeps())
    return min(map(_counted, filter(None, found)), default=math.inf)


def _counted(measured: Measured) -> float:
    # What disturbs the host makes an iteration longer, and none shorter.
    seconds = min(measured.iterations, default=measured.seconds)
    return seconds * (_FLUSHING if measured.allocation_retries else 1.0)


def margin(trial: Trial) -> tuple[float, bool]:
    """The margin of a plan that was measured, and whether the allocator had to flush its cache."""
    flushed = trial.measured is not None and trial.measured.allocation_retries > 0
    return trial.hardware.allocator.margin_fraction, flushed


def why(last: Trial, measured: Measured, hardware: HardwareProfile, *, higher: bool) -> list[str]:
    """What is said of another margin."""
    found = []
    if measured.allocation_retries:
        found.append(
            f"under a margin of {last.hardware.allocator.margin_fraction:.0%} the allocator "
            f"had to flush its cache: tried {hardware.allocator.margin_fraction:.0%}"
        )
    if higher:
        found.append(
            f"a peak of {format_bytes(measured.peak(Tier.DEVICE))} was measured and "
            f"{format_bytes(last.plan.predicted_peak_bytes)} were predicted: tried with a margin "
            "larger by the difference"
        )
    return found
