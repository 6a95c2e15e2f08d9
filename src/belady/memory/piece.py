"""Memory set aside for a plan in one piece, divided once its blocks are seen not to fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from belady.memory.cap import WALL_BYTES, make_room
from belady.memory.ledger import Ledger
from belady.simulate.holes import divisions, told
from belady.simulate.stretch import Event

_log = logging.getLogger("belady")


class Piece:
    """What the iterations under a plan take their blocks from; nothing on a CPU.

    Parameters
    ----------
    nbytes
        What torch's allocator should hold for all in one piece: see `belady.memory.cap.make_room`.
    holes
        Bytes of the holes that it is divided into, and the rest.
    """

    def __init__(self, device: torch.device, nbytes: int, holes: tuple[int, ...] = ()) -> None:
        self._device, self._nbytes = device, nbytes
        self.holes = holes
        self._ledger = Ledger(device)
        self._events: Sequence[Event] = ()
        make_room(device, nbytes, holes)

    def clear(self) -> None:
        """Set it aside anew, unless the budget is far above it: it is in pieces."""
        if self._nbytes > 0:
            make_room(self._device, self._nbytes, self.holes)

    def went(self, *, flushed: bool) -> None:
        """An iteration is over; what it shows does not count where the allocator has ``flushed``.

        After the first such one the next is listened to. At another one the piece is divided as
        suits what that took.
        """
        self._events = self._ledger.end() or self._events
        if not flushed:
            return
        if self._events:
            self.holes, *_ = divisions(self._events, WALL_BYTES, 1)
            _log.info("the allocator flushes its cache: walls leave it %s", told(self.holes))
        self.clear()
        if not self._events:
            self._ledger.begin()

    def close(self) -> None:
        """Listen no more."""
        self._ledger.drop()
