"""Steady iterations in which torch's allocator had to flush its cache, and what is done then."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

# How often what was steady is verified again, and within how many iterations flushes are of one
# cause.
_AGAIN, _NEAR = 3, 8


class Asks(Enum):
    """What an iteration asks for: nothing, memory in one piece again, or another verification."""

    NOTHING = auto()
    ROOM = auto()
    VERIFYING = auto()


@dataclass
class Unrest:
    """What the steady iterations of one kind ask for.

    A single flush can be of what ran in between, such as an evaluation, and leaves memory in
    pieces. Another soon after is the plan's: what was measured of it holds no longer.

    Attributes
    ----------
    again
        How often they were verified again.
    record
        Whether the events of one were taken down that holds no longer, so that another's are to be.
    """

    again: int = 0
    record: bool = False
    _calm: int = _NEAR

    def settles(self) -> None:
        """Another plan is in force: what follows is not of what was before."""
        self._calm = _NEAR

    def asks(self, *, flushed: bool, known: bool) -> Asks:
        """What to do after an iteration.

        Parameters
        ----------
        flushed
            Whether the allocator flushed its cache in it.
        known
            Whether it did while the plan was verified, which goes on nevertheless.
        """
        calm, self._calm = self._calm, 0 if flushed else self._calm + 1
        if not flushed or known:
            return Asks.NOTHING
        if calm >= _NEAR:
            return Asks.ROOM
        if self.again == _AGAIN:
            return Asks.NOTHING
        self.again += 1
        return Asks.VERIFYING
