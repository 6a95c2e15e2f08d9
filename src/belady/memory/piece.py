"""Memory set aside for a plan in one piece, divided once its blocks are seen not to fit."""

from __future__ import annotations

import logging

import torch

from belady.memory.cap import WALL_BYTES, make_room
from belady.memory.ledger import Ledger
from belady.simulate.holes import Holes, divisions, told

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

    def __init__(self, device: torch.device, nbytes: int, holes: Holes = ()) -> None:
        self._device, self._nbytes = device, nbytes
        self.holes = holes
        self._ledger = Ledger(device)
        self._suits: Holes | None = None
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
        if events := self._ledger.end():
            self._suits, *_ = divisions(events, WALL_BYTES, 1)
        if not flushed:
            return
        if self._suits is not None:
            self.holes = self._suits
            _log.info("the allocator flushes its cache: walls leave it %s", told(self.holes))
        self.clear()
        if self._suits is None:
            self._ledger.begin()

    def forget(self) -> None:
        """What was heard of an iteration does not hold any more: the next flush is a first one."""
        self._suits = None

    def close(self) -> None:
        """Listen no more."""
        self._ledger.drop()
