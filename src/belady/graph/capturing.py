"""An iteration is captured, with blocks placed in other ways until one of them has room enough.

What is captured keeps its places, so what best fit loses between blocks is lost for good. How much
that is depends on where the first blocks lie, in a way that nothing foretells: so it is tried.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from belady.errors import TierFullError
from belady.graph.beside import sent
from belady.graph.kinds import Force
from belady.graph.launched import Launched
from belady.ir.trace import Trace
from belady.memory.carrier import Carrier
from belady.memory.launches import Capturing, Launches
from belady.units import format_bytes

_log = logging.getLogger("belady")

# What a pool begins with, as a part of the largest value: a hole. None is known to be better than
# others before one has done.
HOLES = (0, 1, 1 / 2, 2 / 3, 1 / 3, 3 / 4, 1 / 4, 5 / 6, 5 / 12, 11 / 12, 7 / 12, 1 / 6)
# Seconds after which no other is tried: another plan is asked for, and compiled.
_MOST_S = 15.0
# Part of the room that a capture is taken to lack which runs out of memory.
_PART = 20


@dataclass(frozen=True)
class Attempt:
    """What is to be captured.

    Parameters
    ----------
    force
        A plan for one call of one graph.
    carrier
        Has its copies between fixed places made.
    lasting
        Names (``_cdata``) of the storages that outlive iterations.
    args
        Of the call for which it is captured.
    room_bytes
        The most that the device may reserve then.
    first_bytes
        Of the hole to try first: that of the last capture which had room.
    """

    force: Force
    carrier: Carrier
    lasting: set[int]
    args: Sequence[Any]
    room_bytes: int
    first_bytes: int = 0

    def captured(self) -> tuple[Launched | None, int]:
        """What was captured; or None, and the bytes that were lacking: 0 where more would not do.

        Then nothing is left of what was tried.
        """
        least, until = 0, time.monotonic() + _MOST_S
        for hole_bytes in self._holes():
            launches: Capturing = Launches(self.carrier.device, hole_bytes)
            launched, lacking = self._with(launches)
            if launched is not None:
                return launched, 0
            # Frames of what failed may be in cycles; the pool stays as long as one of them does.
            gc.collect()
            launches.forget()
            if lacking:
                least = min(least or lacking, lacking)
            # What is held at once fits nowhere.
            if not lacking or launches.peak_bytes > self.room_bytes or time.monotonic() > until:
                break
        return None, least

    def _holes(self) -> Iterable[int]:
        largest = _largest(self.force.drawn.trace)
        return dict.fromkeys((self.first_bytes, *(int(part * largest) for part in HOLES)))

    def _with(self, launches: Capturing) -> tuple[Launched | None, int]:
        trace, plan = self.force.drawn.trace, self.force.plan
        launched, lacking = None, 0
        try:
            carrier = self.carrier.fixed(sent(trace, plan))
            launched = Launched(self.force, launches, carrier, self.lasting, self.args)
        except (RuntimeError, TierFullError) as error:
            _log.info("an iteration cannot be captured: %s", str(error).partition("\n")[0])
            if isinstance(error, torch.OutOfMemoryError):
                lacking = max(1, self.room_bytes // _PART)
        launches.over()
        if launched is not None and launches.reserved_bytes > self.room_bytes:
            lacking = launches.reserved_bytes - self.room_bytes
            _log.info("an iteration that is captured lacks %s", format_bytes(lacking))
            launched.close()
            launched = None
        return launched, lacking


def _largest(trace: Trace) -> int:
    """Bytes of the largest value that does not outlive iterations."""
    return max((it.nbytes for it in trace.storages if not it.persistent), default=0)
