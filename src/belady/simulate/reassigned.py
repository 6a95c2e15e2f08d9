"""A plan with other decisions, judged and predicted anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Assignment, Plan
from belady.ir.trace import Trace
from belady.simulate.engine import simulate


def reassigned(
    trace: Trace, hardware: HardwareProfile, plan: Plan, assignments: Sequence[Assignment]
) -> Plan | None:
    """The plan with these assignments, and what is then predicted; None if it is not legal."""
    if tuple(assignments) == plan.assignments:
        return plan
    other = replace(plan, assignments=tuple(assignments))
    verdict = check(trace, hardware, other, plan.budget)
    if not verdict.ok:
        return None
    seconds = simulate(trace, hardware, other).seconds
    return replace(other, predicted_peak_bytes=verdict.peak_bytes, predicted_seconds=seconds)
