"""Marks in what torch's allocator is listened to, and the lives of blocks between them.

Who listens knows sizes and addresses, but not what is going on meanwhile. So a mark is a block of
a size that nothing else has, taken and given back at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from belady.memory.extents import round_up
from belady.simulate.coming import Life
from belady.simulate.stretch import LEAST, SMALL, Event, end_of


class Mark(IntEnum):
    """What begins: its bytes. Blocks of a call that is over are not those of the next one.

    POINT: something that may take blocks. AWAY and BACK: bytes of blocks are put elsewhere, and
    come back to blocks of their own, until OVER. BEGIN and END: forward or backward.
    """

    POINT = 77_777
    AWAY = 77_779
    BACK = 77_781
    OVER = 77_783
    BEGIN = 77_785
    END = 77_787

    def leave(self, device: torch.device) -> None:
        """Have it noted, where somebody listens."""
        if device.type == "cuda":
            torch.empty(self.value, dtype=torch.uint8, device=device)


_MARKS = frozenset(it.value for it in Mark)


@dataclass
class Notes:
    """What marks do not say.

    Attributes
    ----------
    away, back
        Addresses of the blocks that go, and come, at each of these marks, and numbers of values.
    gone
        Values that were given up while they were away, and the number of points before.
    results
        Addresses of what forward gives and nobody needs in backward: a launch copies it.
    given
        Addresses and bytes of what backward is given, which a launch has in memory of its own.
    """

    away: list[dict[int, int]] = field(default_factory=list)
    back: list[dict[int, int]] = field(default_factory=list)
    gone: list[tuple[int, int]] = field(default_factory=list)
    results: Sequence[int] = ()
    given: Sequence[tuple[int, int]] = ()


def lives_of(events: Sequence[Event], addresses: Sequence[int], notes: Notes) -> list[Life]:
    """The lives of the large blocks of a forward and a backward, in the order in which they come.

    None are known where marks and notes do not agree: then somebody else has left some, or torch
    has forgotten the first of them.

    As if nothing had been put elsewhere in between. Their moments are the points, and that before
    backward, at which what it is given comes.

    Parameters
    ----------
    events, addresses
        What was noted, see `belady.memory.ledger`.
    """
    reader = _Reader(addresses, notes)
    try:
        for block, nbytes in events:
            if nbytes in _MARKS:
                reader.mark(Mark(nbytes), block)
            elif nbytes:
                reader.taken(block, nbytes)
            else:
                reader.given_back(block)
        return reader.lives()
    except (StopIteration, IndexError):
        return []


def small_bytes_of(events: Iterable[Event]) -> int:
    """What small blocks of an iteration take, which have pages of their own; marks are none."""
    blocks = set[int]()
    found = list[Event]()
    for block, nbytes in events:
        if 0 < nbytes <= SMALL and nbytes not in _MARKS:
            blocks.add(block)
            found.append((block, round_up(nbytes, LEAST)))
        elif not nbytes and block in blocks:
            found.append((block, 0))
    return end_of(found, 0)


class _Reader:
    def __init__(self, addresses: Sequence[int], notes: Notes) -> None:
        self._addresses, self._notes = addresses, notes
        self._away, self._back = iter(notes.away), iter(notes.back)
        self._found: list[list[int]] = []  # bytes, first and last moment, blocks when it goes
        self._of: dict[int, int] = {}  # number in the list by block
        self._elsewhere: dict[int, int] = {}  # the same by value
        self._living: dict[int, tuple[int, int]] = {}  # block and bytes by address
        self._moment, self._sections, self._inside = 0, 0, False
        self._points: list[int] = []
        self._marks: set[int] = set()
        self._zone: Mark | None = None
        self._values: Mapping[int, int] = {}

    def mark(self, mark: Mark, block: int) -> None:
        self._marks.add(block)
        if mark is Mark.POINT:
            self._moment += 1
            self._points.append(self._moment)
        elif mark in (Mark.AWAY, Mark.BACK):
            self._zone = mark
            self._values = next(self._away if mark is Mark.AWAY else self._back)
        elif mark is Mark.OVER:
            self._zone = None
        elif mark is Mark.BEGIN:
            self._begin()
        else:
            self._end()

    def _begin(self) -> None:
        self._sections, self._inside = self._sections + 1, True
        if self._sections == 1:
            return
        self._moment += 1
        for number, (address, nbytes) in enumerate(self._notes.given):
            block, _ = self._living.get(address, (-1, 0))
            if block in self._of or block < 0:
                # Others hold its bytes, or it shares them: it is there to the end, say.
                block = -2 - number
            if nbytes > SMALL:
                self._comes(block, nbytes)

    def _end(self) -> None:
        self._inside = False
        if self._sections > 1:
            return
        for address in self._notes.results:
            block, _ = self._living.get(address, (-1, 0))
            self._goes(block)

    def taken(self, block: int, nbytes: int) -> None:
        address = self._addresses[block]
        self._living[address] = block, nbytes
        # Meanwhile others may take blocks, and give them back.
        if self._zone is Mark.BACK and address in self._values:
            number = self._elsewhere.pop(self._values[address], None)
            if number is not None:
                self._of[block] = number
        elif self._inside and nbytes > SMALL:
            self._comes(block, nbytes)

    def given_back(self, block: int) -> None:
        if block in self._marks:
            return
        address = self._addresses[block]
        self._living.pop(address, None)
        if self._zone is Mark.AWAY and address in self._values and block in self._of:
            self._elsewhere[self._values[address]] = self._of.pop(block)
        else:
            self._goes(block)

    def _comes(self, block: int, nbytes: int) -> None:
        self._of[block] = len(self._found)
        self._found.append([round_up(nbytes, LEAST), self._moment, -1, -1])

    def _goes(self, block: int) -> None:
        if block in self._of:
            self._found[self._of.pop(block)][2:] = self._moment, len(self._found)

    def lives(self) -> list[Life]:
        for value, before in self._notes.gone:
            if value in self._elsewhere:
                number = self._elsewhere.pop(value)
                self._found[number][2] = self._points[before - 1] if before else 0
        return [self._life(*it) for it in self._found]

    def _life(self, nbytes: int, first: int, last: int, gone: int) -> Life:
        last = self._moment if last < 0 else last
        # What goes at its own moment may be followed there by others.
        return (
            Life(nbytes, first, last, gone)
            if gone >= 0 and first == last
            else Life(nbytes, first, last)
        )
