"""Points on the lanes of a device.

Waiting for a fence is always an order given to a stream or to a worker thread; nothing is decided
by whether a fence has passed, so what happens does not depend on timing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from belady.ir.timeline import Lane

# Seconds that a thread sleeps before it asks again whether a fence has passed.
_SHORTEST, _LONGEST = 20e-6, 1e-3


# Two are made for each copy. Not frozen, which would take the host three times as long.
@dataclass(slots=True, eq=False)
class Fence:
    """A point on a lane; this base class stands for one that has already passed.

    Attributes
    ----------
    lane
        Lane on which the point lies.
    order
        Position among the fences of that lane: passing a later one implies the earlier.
    ticks
        Moments at which the copy that it ends began and ended, if they were asked for.
    """

    lane: Lane
    order: int
    ticks: tuple[object, object] | None = field(default=None, kw_only=True)

    def synchronize(self) -> None:
        """Block the calling thread until the point has passed."""

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait until the point has passed."""


@dataclass(slots=True, eq=False)
class CudaFence(Fence):
    """A recorded CUDA event and the stream that it was recorded on."""

    event: torch._C._CudaEventBase
    stream: torch.cuda.Stream

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Give the stream an order, unless it is the one that the point is on."""
        if stream is not self.stream:
            self.event.wait(stream)

    def synchronize(self) -> None:
        """Block the calling thread, asleep, until the event has happened."""
        # `event.synchronize` would spin on a core, unless the event was made to block; but of those
        # a stream takes some dozens (an H100, driver 580: 56), and who records one more is held
        # up until one of them has happened.
        pause = _SHORTEST
        while not self.event.query():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
