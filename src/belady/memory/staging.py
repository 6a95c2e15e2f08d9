"""The way to disk for devices that the system cannot read: through pinned blocks.

Bytes go in pieces: copy-out into a slot of the staging room, from there to disk, and back the
same way, so a parcel of any size needs little room, and the two halves of the way overlap.

Nothing deadlocks: the writer waits only for copies that are issued and for the disk, so slots
that writing holds always come back; and the reader holds one slot at a time. Writing leaves
room for one piece to reading, so that a backlog of writes does not hold reads up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from belady.errors import TierFullError
from belady.ir.timeline import Lane
from belady.ir.trace import Tier
from belady.memory.disk import DiskStore
from belady.memory.extents import PAGE, Extents, Range, round_up
from belady.memory.fences import Fence
from belady.memory.parcels import Arrival, Hub, Parcel
from belady.memory.slab import HostArena
from belady.memory.tickets import Extent

LARGEST_STAGING = 256 * 2**20
LARGEST_PIECE = 32 * 2**20


def staging_bytes(host_budget: int | None) -> int:
    """Bytes of the host budget that staging takes once anything goes to disk."""
    if host_budget is None:
        return LARGEST_STAGING
    return min(LARGEST_STAGING, host_budget // 8 // PAGE * PAGE)


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """A piece of the staging room: its bytes and what must pass before they are written."""

    tensor: torch.Tensor
    room: Range


class Staging:
    """Room in host memory, a writer thread and a reader thread.

    Raises
    ------
    TierFullError
        If the arena has no ``nbytes`` bytes, or they hold no piece each way.
    """

    def __init__(self, hub: Hub, disk: DiskStore, arena: HostArena, nbytes: int) -> None:
        if nbytes < 2 * PAGE:
            raise TierFullError(
                f"staging for the disk tier needs {2 * PAGE} bytes of host memory, but the host "
                f"budget leaves {nbytes}"
            )
        self.piece_bytes = max(PAGE, min(LARGEST_PIECE, nbytes // 4 // PAGE * PAGE))
        self.disk = disk
        self._hub = hub
        self._nbytes = nbytes
        # Held for life: parcels in host memory cannot crowd out the way back from disk.
        self._block = arena.alloc(nbytes)
        self._room = Extents()
        self._room.give(0, nbytes, self._block.fences)
        self._changed = threading.Condition()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="belady-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="belady-reader")

    def send(self, part: torch.Tensor, extent: Extent, home: Fence, label: int) -> Piece:
        """Issue the copy-out of one piece and queue its way to disk; waits for a free slot."""
        with self._hub.meter.stall(Lane.DISK_WRITE, label):
            slot = self._take(part.numel(), spare=self.piece_bytes)
        try:
            after = (home, *slot.room.fences)
            sent = self._hub.copy(Lane.COPY_OUT, slot.tensor, part, after, label)
            queued = self._writer.submit(self._write, slot, extent, sent, label)
        except BaseException:
            self._hub.lanes.drain()
            self._give(slot)
            raise
        return Piece(extent, sent, queued, label)

    def fetch(self, pieces: list[Piece], target: torch.Tensor, home: Fence) -> Future[Fence]:
        """Queue the way of all pieces back; the result is the fence of the last copy-in."""
        return self._reader.submit(self._read, pieces, target, home)

    def close(self) -> None:
        """Finish what is queued and end the threads. Idempotent."""
        self._writer.shutdown(wait=True)
        self._reader.shutdown(wait=True)

    def _write(self, slot: Slot, extent: Extent, sent: Fence, label: int) -> None:
        try:
            sent.synchronize()
            ticket = self.disk.write(slot.tensor, extent)
        except BaseException:
            self._give(slot, (sent,))
            raise
        self._hub.meter.count(Lane.DISK_WRITE, extent.nbytes, label, (ticket, ticket))
        ticket.on_end(lambda: self._give(slot))

    def _read(self, pieces: list[Piece], target: torch.Tensor, home: Fence) -> Fence:
        landed = home
        first = 0
        try:
            for piece in pieces:
                last = first + piece.extent.nbytes
                landed = self._read_piece(piece, target[first:last], home)
                first = last
        except BaseException:
            self._hub.lanes.drain()  # nobody will wait for the pieces that are on their way
            raise
        return landed

    def _read_piece(self, piece: Piece, part: torch.Tensor, home: Fence) -> Fence:
        piece.queued.result()
        slot = self._take(part.numel(), spare=0)
        try:
            # The system writes the slot now, and no stream orders it after older copies.
            for fence in slot.room.fences:
                fence.synchronize()
            ticket = self.disk.read(piece.extent, slot.tensor)
            ticket.wait()
            self._hub.meter.count(Lane.DISK_READ, part.numel(), piece.label, (ticket, ticket))
            landed = self._hub.copy(Lane.COPY_IN, part, slot.tensor, (home,), piece.label)
        except BaseException:
            self._hub.lanes.drain()
            self._give(slot)
            raise
        self._give(slot, (landed,))
        return landed

    def _take(self, nbytes: int, spare: int) -> Slot:
        """Wait for a slot that leaves ``spare`` bytes; an empty room holds any piece."""
        held = round_up(nbytes)
        with self._changed:
            while True:
                room = self._room.take(held) if self._room.free_bytes >= held + spare else None
                if room is not None:
                    return Slot(self._block.tensor[room.start : room.start + nbytes], room)
                self._changed.wait()

    def _give(self, slot: Slot, fences: Iterable[Fence] = ()) -> None:
        with self._changed:
            self._room.give(slot.room.start, slot.room.nbytes, (*slot.room.fences, *fences))
            self._changed.notify_all()


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """One piece of a parcel: where it goes, when it has left, and its way to disk."""

    extent: Extent
    sent: Fence
    queued: Future[None]
    label: int

    def check(self) -> None:
        """Raise what is known to have gone wrong on the way to disk."""
        if self.queued.done():
            self.queued.result()
        written = self.extent.written
        if written is not None and written.error is not None:
            written.wait()

    def settle(self) -> None:
        """Block until the way to disk has ended, well or not."""
        self.queued.exception()


class StagedParcel(Parcel):
    """Bytes on disk that passed through staging."""

    def __init__(self, hub: Hub, staging: Staging, source: torch.Tensor, label: int = -1) -> None:
        home = hub.lanes.present()
        self._staging = staging
        self._pieces: list[Piece] = []
        self._arrivals: list[Future[Fence]] = []
        size = staging.piece_bytes
        parts = [source[at : at + size] for at in range(0, source.numel(), size)]
        extents: list[Extent] = []
        try:
            # All room first: a full disk is then known before anything is copied.
            extents.extend(staging.disk.allocate(part.numel()) for part in parts)
            for part, extent in zip(parts, extents, strict=True):
                self._pieces.append(staging.send(part, extent, home, label))
        except BaseException:
            for piece in self._pieces:
                piece.settle()
            staging.disk.free_all(extents)
            raise
        super().__init__(hub, Tier.DISK, source, home, label)

    def wait_sent(self) -> None:
        """Order the compute stream after the copy-out of the last piece."""
        for piece in self._pieces:
            piece.check()
        with self._hub.meter.stall(Lane.COPY_OUT, self.label):
            for piece in self._pieces[-1:]:
                self._hub.lanes.wait(piece.sent, self._home)
        self._source = None

    def _fetch(self) -> Arrival:
        target, home = self._hub.landing(self.nbytes)
        landed = self._staging.fetch(self._pieces, target, home)
        self._arrivals = [*(it for it in self._arrivals if not it.done()), landed]
        return Arrival(self._hub, Lane.DISK_READ, target, home, landed.result, self.label)

    def _release(self) -> None:
        if self._source is not None:
            for piece in self._pieces[-1:]:
                self._hub.lanes.release_to(piece.sent, self._home)
        for landed in self._arrivals:
            landed.exception()
        for piece in self._pieces:
            piece.settle()
        self._staging.disk.free_all(piece.extent for piece in self._pieces)
