"""Every copy, wait and anchor of one iteration, as they happened."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch

from belady.ir.timeline import Lane
from belady.memory.lanes import Lanes
from belady.memory.tickets import Ticket

# Boundary of the last anchor, which is the end of the iteration.
END = -1


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of ``nbytes`` bytes between two ticks, or a ticket that knows its own times."""

    lane: Lane
    label: int
    nbytes: int
    start: object
    end: object


@dataclass(frozen=True, slots=True)
class Waited:
    """Compute waited for a lane between two ticks, at the anchor ``boundary``."""

    lane: Lane
    label: int
    boundary: int
    start: object
    end: object


@dataclass(frozen=True, slots=True)
class Anchor:
    """The engine got control: a tick of compute, the host's clock, and bytes allocated."""

    boundary: int
    tick: object
    host: float
    nbytes: int


class Tape:
    """Events of one iteration, in order of issue; its clock starts when it is made.

    Starting waits for the device, so that the host's clock and the device's begin together.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._cuda = lanes.device.type == "cuda"
        if self._cuda:
            torch.cuda.synchronize(lanes.device)
        self._device_start = lanes.tick()
        self._host_start = perf_counter()
        self.copies: list[Copied] = []
        self.waits: list[Waited] = []
        self.anchors: list[Anchor] = []
        self.anchor(0)

    def anchor(self, boundary: int) -> None:
        """The engine got control at ``boundary``."""
        nbytes = torch.cuda.memory_allocated(self._lanes.device) if self._cuda else 0
        self.anchors.append(Anchor(boundary, self._lanes.tick(), perf_counter(), nbytes))

    def copied(self, lane: Lane, label: int, nbytes: int, ends: tuple[object, object]) -> None:
        """A copy was issued; ``ends`` are ticks, or twice the ticket of a file."""
        self.copies.append(Copied(lane, label, nbytes, *ends))

    def waited(self, lane: Lane, label: int, ends: tuple[object, object]) -> None:
        """Compute was told to wait."""
        boundary = self.anchors[-1].boundary if self.anchors else 0
        self.waits.append(Waited(lane, label, boundary, *ends))

    def begun(self, tick: object) -> float:
        """Seconds from the start of the tape to ``tick``, where something began."""
        return self._seconds(tick.begun if isinstance(tick, Ticket) else tick)

    def ended(self, tick: object) -> float:
        """Seconds from the start of the tape to ``tick``, where something ended."""
        return self._seconds(tick.over if isinstance(tick, Ticket) else tick)

    def _seconds(self, tick: object) -> float:
        if isinstance(tick, float):
            return tick - self._host_start
        return self._lanes.seconds(self._device_start, tick)
