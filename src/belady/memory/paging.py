"""Values that go out and come back in managed blocks: what a carrier does with managed memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping

import torch

from belady.ir.timeline import Lane
from belady.ir.trace import Tier
from belady.memory.blocks import Lease
from belady.memory.cap import keep_back
from belady.memory.driver import CudaDriver
from belady.memory.fences import Fence
from belady.memory.lanes import Lanes
from belady.memory.managed import ManagedPool
from belady.memory.parcels import Arrival, Hub, Parcel


def cuda_pool(lanes: Lanes) -> ManagedPool:
    """Make a pool of managed blocks for a CUDA device.

    Raises
    ------
    TierError
        If the device has no managed memory.
    """
    told = functools.partial(keep_back, lanes.device, object())
    return ManagedPool(lanes, CudaDriver(lanes.device), told)


class Claim:
    """What one plan needs of managed memory, until it is closed or dropped."""

    def __init__(self, paging: Paging) -> None:
        self._paging = paging

    def close(self) -> None:
        """Give it up. Idempotent."""
        self._paging.give_up(self)


class Paging:
    """The managed memory of a carrier; none is there before it is needed.

    Parameters
    ----------
    make
        Makes the pool.
    """

    def __init__(self, hub: Hub, make: Callable[[], ManagedPool]) -> None:
        self._hub = hub
        self._make = make
        self._pool: ManagedPool | None = None
        self._lock = threading.Lock()

    def claim(self, sizes: Mapping[int, int], room_bytes: int) -> Claim:
        """Take blocks now, while time is not counted.

        Parameters
        ----------
        sizes
            Most values of each size, in bytes, that are in blocks at once.
        room_bytes
            Most bytes of blocks that are on the device at once, by which torch may take less.

        Raises
        ------
        TierFullError, TierError
            As `belady.memory.managed.ManagedPool.claim`, or if there is no managed memory.
        """
        claim = Claim(self)
        if sizes:
            self._hub.sweep()
            # What torch keeps and nobody uses does not count against the blocks.
            torch.cuda.empty_cache()
            self._open().claim(claim, sizes, room_bytes)
        return claim

    def give_up(self, claim: Claim) -> None:
        """Give back the blocks that nobody else claims."""
        self._hub.sweep()
        if self._pool is not None:
            self._pool.give_up(claim)

    def send(self, source: torch.Tensor, label: int = -1, *, faults: bool) -> Parcel:
        """Put ``source`` into a block, and start to move that out.

        The source may be dropped as soon as this returns.

        Parameters
        ----------
        source, label
            As for `belady.memory.carrier.Carrier.send`.
        faults
            Let its pages fault in when they are read.

        Raises
        ------
        TierFullError, TierError
            As `belady.memory.managed.ManagedPool.take`.
        """
        self._hub.check_open()
        self._hub.sweep()
        return ManagedParcel(self._hub, self._open(), source, label, faults=faults)

    def sweep(self) -> None:
        """Give back what was dropped, now."""
        if self._pool is not None:
            self._pool.sweep()

    def reset_peaks(self) -> None:
        """Set peaks to what is held now."""
        if self._pool is not None:
            self._pool.reset_peaks()

    @property
    def parked_bytes(self) -> int:
        """Bytes of the values in blocks, wherever these are."""
        return self._pool.parked_bytes if self._pool is not None else 0

    @property
    def peak_parked_bytes(self) -> int:
        """Most of `parked_bytes`."""
        return self._pool.peak_parked_bytes if self._pool is not None else 0

    @property
    def peak_here_bytes(self) -> int:
        """Most bytes of blocks on the device, where torch's allocator does not see them."""
        return self._pool.peak_here_bytes if self._pool is not None else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of managed memory taken from the system now, used or not."""
        return self._pool.block_bytes if self._pool is not None else 0

    def close(self) -> None:
        """Give all blocks back. Idempotent."""
        if self._pool is not None:
            self._pool.close()

    def _open(self) -> ManagedPool:
        with self._lock:
            if self._pool is None:
                self._pool = self._make()
            return self._pool


class ManagedParcel(Parcel):
    """Bytes in a managed block, which every tensor fetched lies on.

    The source may be dropped by the time it has been made.

    Parameters
    ----------
    faults
        Its pages fault in when they are read: no way back is issued.
    """

    def __init__(
        self, hub: Hub, pool: ManagedPool, source: torch.Tensor, label: int, *, faults: bool
    ) -> None:
        lease = pool.take(source.numel())
        tensor = pool.fill(lease, source)
        home = hub.lanes.present()
        self._sent = pool.send(lease, home)
        hub.meter.count(Lane.COPY_OUT, source.numel(), label, self._sent.ticks)
        self._pool = pool
        self._faults = faults
        self._kept: tuple[Lease, torch.Tensor] | None = lease, tensor
        self._landed: Fence | None = None
        self._gone = False
        super().__init__(hub, Tier.HOST, source, home, label)
        self._source = None

    def wait_sent(self) -> None:
        """Order the compute stream after the way out: the block's device bytes are gone."""
        if self._kept is None or self._gone or self._landed is not None:
            return
        with self._hub.meter.stall(Lane.COPY_OUT, self.label):
            self._hub.lanes.wait(self._sent, self._home)
        self._gone = True
        self._pool.left(self._kept[0])

    def _fetch(self) -> Arrival:
        assert self._kept is not None
        lease, tensor = self._kept
        home = self._hub.lanes.present()
        if self._landed is None:
            self._landed = self._pool.bring(lease, home, faults=self._faults)
            self._hub.meter.count(Lane.COPY_IN, self.nbytes, self.label, self._landed.ticks)
        landed, pool = self._landed, self._pool

        def issued() -> Fence:
            pool.read(lease)
            return landed

        return Arrival(self._hub, Lane.COPY_IN, tensor, home, issued, self.label)

    def _release(self) -> None:
        self._kept = None
