"""What room slices are to leave: for what an optimizer keeps, and for what a plan does."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.trace import Phase, Trace
from belady.measure.held import state_bytes, trained_bytes
from belady.measure.margins import with_settled
from belady.measure.stages import Policy
from belady.planners.places import Sections
from belady.planners.sectioning import Sectioning
from belady.sections.race import Race
from belady.units import format_bytes

_log = logging.getLogger("belady")

# Copies of the parameters that an optimizer may keep, most first: Adam's two, momentum, or none.
COPIES = (2, 1, 0)
# Parts of the budget that the floor in slices is to fit in, tried in turn: what a plan keeps beside
# it saves more time than a few more slices cost.
ROOM = (0.85, 1.0)
# How often sections are chosen anew where the iteration that was observed needs more than its
# static trace said, and for how much less each time than what would have done. They are once more
# where this part of the budget was left for state that no optimizer keeps.
_ANEW, _LESS, _SPARE = 2, 0.98, 1 / 16
# In more slices a call that fits whole is not cut for its workspaces: launches of small kernels
# would cost more than an algorithm without one does. From which number on is not measured.
_FEW = 16
# How far apart a budget that does and one that does not may be, where the smallest is looked for.
_CLOSE = 1.1


class Chosen(NamedTuple):
    """Sections, and for how much of an optimizer's state they leave room."""

    sections: Sections
    state_bytes: int

    def __str__(self) -> str:
        """For a log."""
        found = (f"{' to '.join(it.ends)} in {it.slices}" for it in self.sections)
        return f"{', '.join(found)}, beside {format_bytes(self.state_bytes)} of an optimizer's"


class _Limit(NamedTuple):
    """A budget for slices: in which part of all of it, beside how much of an optimizer's state."""

    nbytes: int
    state: int
    room: float


class Room:
    """What iterations that were observed say of the room that sections are to leave.

    Parameters
    ----------
    budget
        Bytes of the device.

    Attributes
    ----------
    allowed
        Part of the budget that they may fill.
    stepped_bytes
        What an optimizer keeps that was seen to step; None before.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._anew = 0
        self.allowed = 1.0
        self.stepped_bytes: int | None = None

    def leave(self, over: int) -> None:
        """Leave room from now on for bytes that were ``over`` the budget all the same."""
        self.allowed *= _LESS * self._budget / (self._budget + over)

    def lacks(self, over: int) -> bool:
        """Whether sections are to be chosen anew, as there is too little room by so much."""
        if over <= 0 or self._anew == _ANEW:
            return False
        self._anew += 1
        self.leave(over)
        return True

    def spares(self, trace: Trace, left: int) -> bool:
        """Whether they are, as an optimizer stepped that keeps far less than ``left`` for it.

        Once: what it keeps is known then.
        """
        steps = any(op.phase is Phase.OPTIMIZER for op in trace.ops)
        if self.stepped_bytes is not None or not steps:
            return False
        self.stepped_bytes = state_bytes(trace)
        return left - self.stepped_bytes > _SPARE * self._budget

    def beside(self, policy: Policy, hardware: HardwareProfile, held_bytes: int) -> Beside:
        """What sections have to fit in, where so much is known to be held before a step."""
        state = self.stepped_bytes
        held_bytes = max(held_bytes, state or 0)
        return Beside(policy, hardware, held_bytes, state is not None, self.allowed)


@dataclass(frozen=True, slots=True)
class Beside:
    """What sections of a call have to fit in.

    Attributes
    ----------
    policy, hardware
        Whose budget it is, and which margins are asked for.
    held_bytes
        What an optimizer is known to keep.
    stepped
        Whether it was seen to step, and so keeps no more than that.
    allowed
        Part of the budget that they may fill, where that is known.
    most_slices
        Of one section; None where any number will do.
    """

    policy: Policy
    hardware: HardwareProfile
    held_bytes: int = 0
    stepped: bool = False
    allowed: float = 1.0
    most_slices: int | None = None

    def in_few(self) -> Beside:
        """The same for a call that fits as it is: slices are to be worth their launches."""
        return replace(self, most_slices=_FEW)

    def chosen(
        self,
        searches: Sequence[Sectioning],
        trace: Trace,
        copies: Sequence[int],
        race: Race | None = None,
    ) -> Chosen | None:
        """Sections beside what an optimizer keeps, by the first of the searches that finds any.

        Before it has stepped that is taken for the most copies of what is trained that leave room
        for any sections.

        Parameters
        ----------
        race
            Where there is one, it picks from all that are found beside as much, with as much room
            left, or takes what is near them.
        """
        states = self._states(trace, copies)
        limits = list({it.nbytes: it for it in self._limits(trace, states)}.values())
        tried = ((search.within(at.nbytes), at) for search, at in product(searches, limits))
        first, found = next(((it, at) for it, at in tried if it and self._few(it)), (None, None))
        if first is None or found is None:
            return None
        if race is None:
            return Chosen(first, found.state)
        # Less room than the first was found in may have been seen to be too little.
        alike = [it.nbytes for it in limits if it[1:] == found[1:]]
        left = product(searches, (it for it in alike if it != found.nbytes))
        others = (search.within(it) for search, it in left)
        choices = dict.fromkeys([first, *(it for it in others if it)])
        room = self._rest(self.hardware.allocator, self.allowed, found.state)
        return Chosen(race.fastest(list(choices), room, alike), found.state)

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
        state = max(self._states(trace, COPIES))
        allocator = self.hardware.allocator
        while high > _CLOSE * low:
            middle = int((low * high) ** 0.5)
            rest = allocator.peak_within(int(self.allowed * middle)) - state
            if search.within(allocator.budget_for(rest)):
                found = high = middle
            else:
                low = middle
        return found

    def _few(self, sections: Sections) -> bool:
        most = self.most_slices
        return most is None or all(section.slices <= most for section in sections)

    def _states(self, trace: Trace, copies: Sequence[int]) -> list[int]:
        if self.stepped:
            return [self.held_bytes]
        return [max(it * trained_bytes(trace), self.held_bytes) for it in copies]

    def _limits(self, trace: Trace, states: Sequence[int]) -> Iterator[_Limit]:
        """Budgets of what is in slices, without margins on the state beside: it always is there."""
        plain = self.hardware.allocator
        settled = with_settled(trace, self.hardware, self.policy.name).allocator
        rooms = dict.fromkeys((*(room * self.allowed for room in ROOM), ROOM[-1]))
        # Nothing is lost between blocks that stay, but little room was seen to be too little.
        for margins in (plain, settled):
            for state in states:
                for room in rooms:
                    yield _Limit(plain.budget_for(self._rest(margins, room, state)), state, room)

    def _rest(self, margins: Allocator, room: float, state: int) -> int:
        if margins.settled_bytes:
            margins = replace(margins, settled_bytes=margins.settled_bytes + state)
        return margins.peak_within(int(room * self.policy.budget.device_bytes)) - state
