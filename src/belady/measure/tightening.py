"""After the device ran out of memory under a plan: a wider margin, or the floor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Plan
from belady.ir.timeline import Measured
from belady.ir.trace import Trace
from belady.measure.corrections import wider
from belady.measure.margins import towards

FLOOR = "floor"
# Margins that are tried before the floor.
_WIDENED = 2
# What is measured of an iteration that came to nothing: no plan is slower, or fits worse.
NOTHING = Measured(1, math.inf, (), (), allocation_retries=1)


class Tightened(NamedTuple):
    """A plan that leaves the allocator more room, whose it is, and what to tell of it."""

    plan: Plan
    hardware: HardwareProfile
    policy: str
    note: str


def tightened(
    trace: Trace,
    plan: Plan,
    hardware: HardwareProfile,
    tried: Sequence[Measured | None],
    make: Callable[[str, HardwareProfile], Plan],
    policy: str,
) -> Tightened | None:
    """What to go on with where ``plan`` ran out of memory; None where nothing takes less.

    Parameters
    ----------
    tried
        What was measured under the plans so far, `NOTHING` where memory ran out.
    make
        Makes the plan of a policy for a machine, or raises `InfeasibleBudgetError`.
    policy
        Whose plan it was.
    """
    if policy == FLOOR:
        return None
    before = hardware.allocator.margin_fraction
    ran_out = f"under a margin of {before:.0%} the device ran out of memory"
    left = _WIDENED + 1 - sum(it is NOTHING for it in tried)
    more = hardware
    for _ in range(left):
        more = replace(hardware, allocator=wider(more.allocator))
        found = towards(trace, before, more, lambda machine: make(policy, machine))
        if found is None:
            break
        # Where there is room for more than the margin, a wider one changes nothing.
        if found[0].decisions != plan.decisions:
            after = found[1].allocator.margin_fraction
            return Tightened(*found, policy, f"{ran_out}: tried {after:.0%}")
    bare = replace(hardware.allocator, margin_fraction=0.0, margin_bytes=0)
    without = replace(hardware, allocator=bare)
    try:
        floor = make(FLOOR, without)
    except InfeasibleBudgetError:
        return None
    return Tightened(floor, without, FLOOR, f"{ran_out}: all that may move does from then on")
