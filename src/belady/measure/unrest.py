"""Steady iterations in which torch's allocator had to flush its cache, and what is done then."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

# How often what was steady is verified again.
_AGAIN = 3


class Asks(Enum):
    """What an iteration asks for: nothing, memory in one piece again, or another verification."""

    NOTHING = auto()
    ROOM = auto()
    VERIFYING = auto()


@dataclass
class Unrest:
    """What the steady iterations of one kind ask for.

    A single flush can be of what ran in between, such as an evaluation, and leaves memory in
    pieces. Two in a row are the plan's: what was measured of it holds no longer.

    Attributes
    ----------
    again
        How often they were verified again.
    record
        Whether the events of one were taken down that holds no longer, so that another's are to be.
    """

    again: int = 0
    record: bool = False
    _row: int = 0

    def asks(self, *, flushed: bool, known: bool) -> Asks:
        """What to do after an iteration.

        Parameters
        ----------
        flushed
            Whether the allocator flushed its cache in it.
        known
            Whether it did while the plan was verified, which goes on nevertheless.
        """
        self._row = self._row + 1 if flushed else 0
        if self._row == 1 and not known:
            return Asks.ROOM
        if self._row > 1 and not known and self.again < _AGAIN:
            self.again, self._row = self.again + 1, 0
            return Asks.VERIFYING
        return Asks.NOTHING
