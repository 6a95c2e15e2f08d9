"""What listeners hear of iterations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from belady.ir.trace import Tier
from belady.measure.monitor import Sample
from belady.measure.stages import Stage


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One finished iteration, for listeners.

    Attributes
    ----------
    index
        From 1, of all kinds of iterations.
    seconds
        From its first pass to its last backward.
    peak_bytes
        Most bytes that the device held; 0 where nobody counted, as on a CPU, whose bytes are
        counted op by op in one iteration alone, or in steady ones, of which nothing is.
    budget_bytes
        Of the device.
    stall_seconds
        For which computing waited for copies; 0 where nobody counted.
    phase
        ``"warm-up"``, ``"observed"``, ``"first planned"``, ``"paced"``, ``"verified"`` or
        ``"steady"``.
    """

    index: int
    seconds: float
    peak_bytes: int
    budget_bytes: int
    stall_seconds: float
    phase: str


@dataclass
class Listeners:
    """Tells of every iteration when the next one has ended.

    So reading how long it took does not make the host wait for the device.

    Attributes
    ----------
    budget_bytes
        Of the device.
    """

    budget_bytes: int
    all: list[Callable[[IterationStats], None]] = field(default_factory=list)
    _count: int = 0
    _untold: tuple[Stage, Sample] | None = None

    def ended(self, stage: Stage, sample: Sample) -> None:
        """Tell of the iteration before, and remember this one."""
        self.tell()
        self._untold = (stage, sample)

    def tell(self) -> None:
        """Tell of the last iteration, if nobody was told yet."""
        if self._untold is None:
            return
        (stage, sample), self._untold = self._untold, None
        self._count += 1
        peak = next((p.nbytes for p in sample.peaks if p.tier is Tier.DEVICE), 0)
        budget, waited = self.budget_bytes, sample.stall_seconds
        stats = IterationStats(self._count, sample.seconds, peak, budget, waited, stage.value)
        for listener in self.all:
            listener(stats)
