"""An iteration is captured, with blocks placed in other ways until one of them has room enough.

What is captured keeps its places, so what best fit loses between blocks is lost for good. A pool
that grows as it is used is what takes least where there is plenty; else it begins with all of its
room in one piece, which walls divide as simulation has it (`belady.simulate.holes`).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from belady.errors import TierFullError
from belady.graph import beside
from belady.graph.kinds import Force, Kind
from belady.graph.launched import Launched
from belady.memory.cap import WALL_BYTES
from belady.memory.capturing import Capturing, LackingError
from belady.memory.carrier import Carrier
from belady.memory.launches import Launches
from belady.simulate.holes import Holes, divisions, told
from belady.simulate.packing import Packing, held_bytes
from belady.simulate.stretch import Event
from belady.units import format_bytes

_log = logging.getLogger("belady")

# Divisions of a piece that are tried, the best first.
DIVISIONS = 8
# Seconds after which no other is tried: another plan is asked for, and compiled.
_MOST_S = 15.0
# Part of the room that a capture is taken to lack which runs out of memory.
_PART = 40
# The same, of what blocks may take more that are packed anew.
_CHANCE = 200


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
    events
        Blocks that come and go in an iteration, in order, as far as that is known.
    first
        What the pool of the last capture that had room began with.
    packing
        Of the blocks that come and go; then they are placed in no other way.
    still
        Places of inputs that do not last and are read where they lie.
    """

    force: Force
    carrier: Carrier
    lasting: set[int]
    args: Sequence[Any]
    room_bytes: int
    events: Sequence[Event] = ()
    first: Holes | None = None
    packing: Packing | None = None
    still: Set[int] = frozenset()

    @classmethod
    def of(
        cls, kind: Kind, carrier: Carrier, lasting: set[int], args: Sequence[Any], room_bytes: int
    ) -> Attempt:
        """Under the plan in force, by what is known of its blocks."""
        assert kind.force is not None
        return cls(
            kind.force,
            carrier,
            lasting,
            args,
            room_bytes,
            events=kind.prospect.heard.events,
            first=kind.prospect.holes,
            packing=kind.prospect.heard.packing,
            still=beside.still(kind),
        )

    def captured(self) -> tuple[Launched | None, int, str]:
        """What was captured; or None, the bytes that were lacking, and why: 0 if more will not do.

        Then nothing is left of what was tried.
        """
        least, why, until = 0, "", time.monotonic() + _MOST_S
        for holes in self._ways():
            device, room = self.carrier.device, self.room_bytes
            launches: Capturing = Launches(device, holes, room, self.packing)
            launched, lacking, why = self._with(launches)
            if launched is not None:
                if holes is not None:
                    _log.info("an iteration is captured in one piece: %s", self._told(launched))
                return launched, 0, ""
            # Frames of what failed may be in cycles; the pool stays as long as one of them does.
            gc.collect()
            launches.forget()
            if lacking:
                least = min(least or lacking, lacking)
            # What is held at once fits nowhere.
            if not lacking or launches.peak_bytes > self.room_bytes or time.monotonic() > until:
                break
        return None, least, why

    def _ways(self) -> Iterator[Holes | None]:
        """What a pool may begin with; one thing after another is worked out as it is asked for."""
        if self.packing is not None:
            yield ()
            return
        yield self.first
        if self.first is not None:
            yield None
        found = divisions(self.events, WALL_BYTES, DIVISIONS)
        yield from (it for it in found if it != self.first)

    def _told(self, launched: Launched) -> str:
        if self.packing is None:
            return told(launched.launches.holes or ())
        return f"{self._packed()}; places of {launched.missed} were not free"

    def _packed(self) -> str:
        assert self.packing is not None
        held = format_bytes(held_bytes(self.packing.lives))
        end, small = format_bytes(self.packing.end), format_bytes(self.packing.small_bytes)
        return f"blocks of {held} are packed into {end}, and small ones take {small}"

    def _with(self, launches: Capturing) -> tuple[Launched | None, int, str]:
        trace, plan = self.force.drawn.trace, self.force.plan
        launched, lacking, why = None, 0, ""
        try:
            carrier = self.carrier.fixed(beside.sent(trace, plan))
            launched = Launched(self.force, launches, carrier, self.lasting, self.args, self.still)
        except (RuntimeError, TierFullError) as error:
            why, _, _ = str(error).partition("\n")
            _log.info("an iteration cannot be captured: %s", why)
            if isinstance(error, LackingError):
                lacking = error.nbytes + self.room_bytes // _CHANCE
                _log.info("%s", self._packed())
            elif isinstance(error, torch.OutOfMemoryError):
                lacking = max(1, self.room_bytes // _PART)
        launches.over()
        if launched is not None and launches.reserved_bytes > self.room_bytes:
            lacking = launches.reserved_bytes - self.room_bytes
            _log.info("an iteration that is captured lacks %s", format_bytes(lacking))
            launched.close()
            launched = None
        return launched, lacking, why
