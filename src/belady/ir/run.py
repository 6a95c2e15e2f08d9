"""One run: everything that reports, traces and explanations read."""

from __future__ import annotations

from dataclasses import dataclass, field

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Plan
from belady.ir.timeline import Measured, Timeline
from belady.ir.trace import Trace


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
