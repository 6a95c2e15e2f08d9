"""What room slices are to leave: for what an optimizer keeps, and for what a plan does."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.trace import Trace
from belady.measure.held import trained_bytes
from belady.measure.margins import with_settled
from belady.measure.stages import Policy
from belady.planners.places import Sections
from belady.planners.sectioning import Sectioning

_log = logging.getLogger("belady")

# Copies of the parameters that an optimizer may keep, most first: Adam's two, momentum, or none.
COPIES = (2, 1, 0)
# Parts of the budget that the floor in slices is to fit in, tried in turn: what a plan keeps beside
# it saves more time than a few more slices cost.
ROOM = (0.85, 1.0)
# How far apart a budget that does and one that does not may be, where the smallest is looked for.
_CLOSE = 1.1


@dataclass(frozen=True, slots=True)
class Beside:
    """What sections of a call have to fit in.

    Attributes
    ----------
    policy, hardware
        Whose budget it is, and which margins are asked for.
    held_bytes
        What an optimizer is known to keep.
    allowed
        Part of the budget that they may fill, where that is known.
    """

    policy: Policy
    hardware: HardwareProfile
    held_bytes: int = 0
    allowed: float = 1.0

    def chosen(self, search: Sectioning, trace: Trace, copies: Sequence[int]) -> Sections | None:
        """Sections beside the most copies of what is trained that leave room for any."""
        states = [max(it * trained_bytes(trace), self.held_bytes) for it in copies]
        tried = (search.within(limit) for limit in dict.fromkeys(self._limits(trace, states)))
        return next((it for it in tried if it), None)

    def least_bytes(self, search: Sectioning, trace: Trace, whole: int) -> int | None:
        """A budget below ``whole`` in which slices do beside two copies of what is trained.

        The smallest but for a tenth, by bisection; None if there is none.

        Parameters
        ----------
        whole
            What the call needs as it is.
        """
        _log.info("looking for a budget in which slices do, since this one is too small")
        low, high, found = self.policy.budget.device_bytes, whole, None
        state = max(max(COPIES) * trained_bytes(trace), self.held_bytes)
        allocator = self.hardware.allocator
        while high > _CLOSE * low:
            middle = int((low * high) ** 0.5)
            rest = allocator.peak_within(int(self.allowed * middle)) - state
            if search.within(allocator.budget_for(rest)):
                found = high = middle
            else:
                low = middle
        return found

    def _limits(self, trace: Trace, states: Sequence[int]) -> Iterator[int]:
        """Budgets of what is in slices, without margins on state: it is there throughout."""
        plain = self.hardware.allocator
        settled = with_settled(trace, self.hardware, self.policy.name).allocator
        rooms = dict.fromkeys((*(room * self.allowed for room in ROOM), ROOM[-1]))
        # Nothing is lost between blocks that stay, but little room was seen to be too little.
        for margins in (plain, settled):
            for state in states:
                for room in rooms:
                    yield plain.budget_for(self._rest(margins, room, state))

    def _rest(self, margins: Allocator, room: float, state: int) -> int:
        if margins.settled_bytes:
            margins = replace(margins, settled_bytes=margins.settled_bytes + state)
        return margins.peak_within(int(room * self.policy.budget.device_bytes)) - state
