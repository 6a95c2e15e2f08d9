"""Bytes on their way out of a device, parked, and on their way back."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable

import torch

from belady.errors import TierError
from belady.ir.timeline import Lane
from belady.ir.trace import Tier
from belady.memory.disk import DiskStore
from belady.memory.fences import Fence
from belady.memory.lanes import Lanes
from belady.memory.meter import Meter
from belady.memory.slab import Block, HostArena
from belady.memory.tickets import Ticket


class Hub:
    """What all parcels of a carrier share.

    ``dropped`` holds duties: what to give back for parcels released and arrivals that died
    before anyone waited for them. Releasing happens in finalizers, and a garbage collection
    may run at any point of any thread, also inside our own locks or on the very worker to be
    waited for. So a release only queues its duty, and the next call from outside does it,
    before it takes any room.
    """

    def __init__(self, lanes: Lanes, meter: Meter) -> None:
        self.lanes = lanes
        self.meter = meter
        self.closed = False
        self.dropped: deque[Callable[[], None]] = deque()
        self._sweeping = threading.Lock()

    def check_open(self) -> None:
        """Refuse to carry anything after the carrier was closed."""
        if self.closed:
            raise TierError("the carrier is closed")

    def copy(
        self,
        lane: Lane,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Iterable[Fence],
        label: int = -1,
    ) -> Fence:
        """Issue a copy and count it."""
        fence = self.lanes.copy(lane, target, source, after)
        self.meter.count(lane, target.numel(), label, fence.ticks)
        return fence

    def landing(self, nbytes: int) -> tuple[torch.Tensor, Fence]:
        """Make a target on the current compute stream, and the point from which it is ours.

        The fence comes second: a debug fill of new memory must not overtake the copy.
        """
        target = torch.empty(nbytes, dtype=torch.uint8, device=self.lanes.device)
        return target, self.lanes.present()

    def sweep(self) -> None:
        """Do the duties queued; never called by a finalizer or a worker."""
        if not self.dropped:
            return
        with self._sweeping:
            while self.dropped:
                duty = self.dropped.popleft()
                try:
                    duty()
                except BaseException as error:
                    if not isinstance(error, Exception):  # Ctrl-C: a duty may be begun twice
                        self.dropped.append(duty)
                    raise


class Arrival:
    """A copy coming back to the device.

    Attributes
    ----------
    tensor
        One-dimensional uint8 tensor on the device; not to be read before `wait`.
    """

    def __init__(
        self,
        hub: Hub,
        lane: Lane,
        tensor: torch.Tensor,
        home: Fence,
        issued: Callable[[], Fence],
        label: int = -1,
    ) -> None:
        self.tensor = tensor
        self._label = label
        self._hub = hub
        self._lane = lane
        self._home = home
        self._issued = issued
        self._waited = False

    def wait(self) -> None:
        """Make the current compute stream wait for the bytes (CPU: block until they are read).

        Every stream that reads the tensor must call it; a later call on the same stream
        costs next to nothing.

        Raises
        ------
        SpillError
            If reading or writing the spilled bytes failed.
        """
        with self._hub.meter.stall(self._lane, self._label):
            fence = self._issued()
            self._hub.lanes.wait(fence, self._home)
        self._waited = True

    def _abandon(self) -> None:
        # The memory of the tensor may be reused as soon as this returns. A copy that failed
        # has left nothing in flight.
        try:
            fence = self._issued()
        except Exception:
            return
        self._hub.lanes.release_to(fence, self._home)

    def __del__(self) -> None:
        if not self._waited:
            self._hub.dropped.append(self._abandon)


class Parcel(ABC):
    """Bytes sent to a tier.

    It keeps the source alive until `wait_sent` or `release`, so dropping it is always safe.

    Attributes
    ----------
    nbytes
        Bytes sent.
    tier
        Where they are kept.
    label
        What records call them.
    """

    # Until a constructor has succeeded there is nothing to release.
    _released = True

    def __init__(self, hub: Hub, tier: Tier, source: torch.Tensor, home: Fence, label: int) -> None:
        self.nbytes = source.numel()
        self.label = label
        self.tier = tier
        self._hub = hub
        self._home = home
        self._source: torch.Tensor | None = source
        self._released = False

    @abstractmethod
    def wait_sent(self) -> None:
        """Make the current compute stream wait until the bytes have left the source.

        Afterwards the source may be dropped or overwritten. Where the system writes device
        memory directly (CPU to disk) the calling thread blocks until it is written.

        Raises
        ------
        SpillError
            If writing is known to have failed; the source still holds the bytes.
        """

    def fetch(self) -> Arrival:
        """Start a copy back into a new tensor; each call gives another one.

        Raises
        ------
        TierError
            If the parcel was released or the carrier is closed.
        torch.OutOfMemoryError
            If the device has no room for the tensor.
        """
        self._hub.check_open()
        if self._released:
            raise TierError(f"{self.nbytes} bytes in tier {self.tier} were released already")
        self._hub.sweep()
        return self._fetch()

    def release(self) -> None:
        """Give the room in the tier back, also while copies are in flight. Idempotent.

        It neither blocks nor locks, so finalizers may call it. The room is free again before
        the carrier's next call takes any, or counts it.
        """
        if not self._released:
            self._released = True
            self._hub.dropped.append(self._let_go)

    def _let_go(self) -> None:
        self._release()
        self._source = None

    @abstractmethod
    def _fetch(self) -> Arrival: ...

    @abstractmethod
    def _release(self) -> None: ...

    def __del__(self) -> None:
        self.release()


class HostParcel(Parcel):
    """Bytes in a block of host memory."""

    def __init__(self, hub: Hub, arena: HostArena, source: torch.Tensor, label: int = -1) -> None:
        block = arena.alloc(source.numel())
        try:
            home = hub.lanes.present()
            after = (home, *block.fences)
            self._sent = hub.copy(Lane.COPY_OUT, block.tensor, source, after, label)
        except BaseException:
            give_back(hub, arena, block)
            raise
        self._arena = arena
        self._block = block
        self._fences: tuple[Fence, ...] = (self._sent,)
        super().__init__(hub, Tier.HOST, source, home, label)

    def wait_sent(self) -> None:
        """Order the compute stream after the copy-out."""
        with self._hub.meter.stall(Lane.COPY_OUT, self.label):
            self._hub.lanes.wait(self._sent, self._home)
        self._source = None

    def _fetch(self) -> Arrival:
        target, home = self._hub.landing(self.nbytes)
        after = (home, self._sent)
        landed = self._hub.copy(Lane.COPY_IN, target, self._block.tensor, after, self.label)
        # It follows those before it on its lane.
        self._fences = (self._sent, landed)
        return Arrival(self._hub, Lane.COPY_IN, target, home, lambda: landed, self.label)

    def _release(self) -> None:
        if self._source is not None:
            self._hub.lanes.release_to(self._sent, self._home)
        self._arena.free(self._block, self._fences)


class DirectParcel(Parcel):
    """Bytes on disk, written and read by the system straight from and to the device."""

    def __init__(self, hub: Hub, disk: DiskStore, source: torch.Tensor, label: int = -1) -> None:
        home = hub.lanes.present()
        self._disk = disk
        self._extent = disk.allocate(source.numel())
        try:
            self._written = disk.write(source, self._extent)
        except BaseException:
            disk.free(self._extent)
            raise
        ends = (self._written, self._written)
        hub.meter.count(Lane.DISK_WRITE, source.numel(), label, ends)
        super().__init__(hub, Tier.DISK, source, home, label)

    def wait_sent(self) -> None:
        """Block until the bytes are on disk."""
        with self._hub.meter.stall(Lane.DISK_WRITE, self.label):
            self._written.wait()
        self._source = None

    def _fetch(self) -> Arrival:
        target, home = self._hub.landing(self.nbytes)
        ticket = self._disk.read(self._extent, target)
        self._hub.meter.count(Lane.DISK_READ, self.nbytes, self.label, (ticket, ticket))
        landed = functools.partial(_landed, ticket, home)
        return Arrival(self._hub, Lane.DISK_READ, target, home, landed, self.label)

    def _release(self) -> None:
        self._disk.free(self._extent)


def _landed(ticket: Ticket, home: Fence) -> Fence:
    ticket.wait()
    return home


def give_back(hub: Hub, arena: HostArena, block: Block) -> None:
    """Give a block back after a failure, when it is not known which copies were issued."""
    hub.lanes.drain()
    arena.free(block)
