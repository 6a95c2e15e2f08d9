"""The least that a policy can do with, and which module asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.margin import needed
from belady.ir.plan import Budget
from belady.ir.trace import Trace
from belady.planners import plan, traits_of
from belady.planners.floor import held_by_floor


@dataclass(frozen=True, slots=True)
class Least:
    """What plans need at least: those of the floor, or of a policy that has none as lean.

    Attributes
    ----------
    budget
        What is needed depends on its bytes of host and disk; whoever asks compares it with those of
        the device.
    """

    hardware: HardwareProfile
    budget: Budget
    policy: str = "floor"

    @property
    def is_floor(self) -> bool:
        """Whether that is what the floor needs."""
        return self.policy == "floor"

    def needed(self, trace: Trace) -> tuple[int, str]:
        """Bytes of the smallest budget, and the module of the op that needs most."""
        if self.is_floor:
            held = self.held_by_floor(trace)
            nbytes, at = needed(trace, self.hardware.allocator, held)
            return nbytes, trace.ops[at].module if held else ""
        try:
            plan(self.policy, trace, self.hardware, replace(self.budget, device_bytes=0))
        except InfeasibleBudgetError as error:
            return error.smallest_bytes, error.module
        return 0, ""

    def held_by_floor(self, trace: Trace) -> Sequence[int]:
        """Bytes that the floor holds during each op."""
        return held_by_floor(trace, self.hardware, self.budget)


def least_of(policy: str, hardware: HardwareProfile, budget: Budget) -> Least:
    """What plans of a policy need at least."""
    return Least(hardware, budget, "floor" if traits_of(policy).lean_as_floor else policy)
