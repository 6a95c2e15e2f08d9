"""One run: everything that reports, traces and explanations read."""

from __future__ import annotations

from dataclasses import dataclass, field

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Plan
from belady.ir.timeline import Measured, Timeline
from belady.ir.trace import Trace

# How notes begin that name a part of a model which runs as plain PyTorch.
UNMANAGED = "not captured, and so not managed"


@dataclass(frozen=True)
class Run:
    """A trace, the machine, the plan, what was predicted and what was measured."""

    trace: Trace
    hardware: HardwareProfile
    plan: Plan
    predicted: Timeline
    measured: Measured | None = None
    notes: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    version: int = field(default=1, metadata={"const": 1})

    @property
    def counts_all(self) -> bool:
        """Whether peaks are of all that ran: on a CPU only what was captured is counted."""
        return self.trace.device != "cpu" or not any(it.startswith(UNMANAGED) for it in self.notes)
