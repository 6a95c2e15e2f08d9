"""Blocks of CUDA managed memory, which leave the device and come back by explicit prefetch.

A value that a plan manages is copied on the device into a block of our own, and from then on is
that block: out and back by prefetch, and read where it lies. The other way, routing what forward
allocates to a managed pool of torch's allocator (`torch.cuda.MemPool`), was not taken: without a
compiler the pool would call Python while it holds the allocator's lock, and a thread that frees a
tensor while it holds the interpreter's lock would wait for it forever. It would also take in all
that forward makes, and nothing that backward does.

Device bytes follow from issue order. They are taken in three places alone (a value is copied into
its block; a way back is issued; pages may fault in), each of which first gives back the blocks that
nobody holds any more, and is ordered after that. A block given back is discarded where the driver
can do that (CUDA 13), and counts as gone: as CUDA documents it, who needs device memory next gets
its pages without a copy. Else they are written back.

The paper (OC-DNN, HiPC 2018) prefetches the destination of each copy, and lets the driver evict
what was advised to prefer the host. Here a prefetch does both, and blocks prefer the device: advice
takes effect at once and not in the order of a stream, and pages that prefer the host would be read
across the link instead of faulting in.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from belady.errors import TierError
from belady.ir.timeline import Lane
from belady.memory.blocks import Block, Blocks, Driver, Lease
from belady.memory.fences import Fence
from belady.memory.lanes import Lanes
from belady.memory.streams import current_stream


class ManagedPool:
    """Managed blocks of one device, used again by size. Thread-safe.

    Parameters
    ----------
    keep_back
        Told how many bytes of the budget are for blocks, so that torch takes no more than the rest.

    Attributes
    ----------
    here_bytes, peak_here_bytes
        Bytes of blocks on the device, in issue order, and the most of them.
    parked_bytes, peak_parked_bytes
        Bytes of the values that are in blocks, and the most of them.
    """

    def __init__(self, lanes: Lanes, driver: Driver, keep_back: Callable[[int], None]) -> None:
        self._lanes = lanes
        self._driver = driver
        self._keep_back = keep_back
        self._lock = threading.Lock()
        self._blocks = Blocks(driver)
        # Finalizers only append to it: they may run anywhere, also inside our own lock.
        self._dropped: deque[Block] = deque()
        self._returned: Fence | None = None
        self._closed = False
        self.here_bytes = self.peak_here_bytes = 0
        self.parked_bytes = self.peak_parked_bytes = 0

    def claim(self, owner: object, sizes: Mapping[int, int], room_bytes: int) -> None:
        """Take the blocks that ``owner`` needs beside what others need, until it gives up or dies.

        Parameters
        ----------
        sizes, room_bytes
            See `belady.memory.paging.Paging.claim`.

        Raises
        ------
        TierFullError, TierError
            As `belady.memory.blocks.Blocks.settle`; then nothing is claimed.
        """
        with self._lock:
            self._sweep()
            self._blocks.claim(owner, sizes, room_bytes)
            try:
                self._keep_back(self._blocks.settle())
            except BaseException:
                self._give_up(owner)
                raise

    def give_up(self, owner: object) -> None:
        """Give back the blocks that nobody claims but ``owner``."""
        with self._lock:
            self._sweep()
            self._give_up(owner)

    def _give_up(self, owner: object) -> None:
        self._blocks.forget(owner)
        self._keep_back(self._blocks.settle())

    def take(self, nbytes: int) -> Lease:
        """Give a block with room for ``nbytes`` bytes.

        Raises
        ------
        TierFullError, TierError
            As `claim`, where more are in use than were claimed.
        """
        with self._lock:
            if self._closed:
                raise TierError("the pool of managed memory is closed")
            self._sweep()
            block = self._blocks.take(nbytes)
            block.used = nbytes
            self.parked_bytes += nbytes
            self.peak_parked_bytes = max(self.peak_parked_bytes, self.parked_bytes)
        return Lease(block, self.give_back)

    def fill(self, lease: Lease, source: torch.Tensor) -> torch.Tensor:
        """Copy ``source`` into the block on the current stream, and give the block's bytes.

        The source may be dropped as soon as this returns.
        """
        block, stream = lease.block, current_stream(self._lanes.device)
        home = self._lanes.present()
        with self._lock:
            self._come(block)
            before = [fence for fence in (home, block.last, self._returned) if fence is not None]
        # On a lane: batched calls may refuse the legacy default stream, which this may be.
        block.last = self._move(block, Lane.COPY_IN, before, discard=True)
        self._lanes.wait(block.last, home)
        target = self._driver.tensor(lease)
        target.copy_(source)
        if stream is not None:
            # Nothing happens unless the source was allocated on another stream.
            source.record_stream(stream)
        return target

    def send(self, lease: Lease, home: Fence) -> Fence:
        """Issue the way out after ``home``; device bytes are held until `left`."""
        block = lease.block
        block.last = self._move(block, Lane.COPY_OUT, [home])
        return block.last

    def left(self, lease: Lease) -> None:
        """Count the device bytes of a block as gone: compute has been told to wait for that."""
        with self._lock:
            self._go(lease.block)

    def bring(self, lease: Lease, home: Fence, *, faults: bool) -> Fence:
        """Take device bytes, and issue the way back after ``home`` unless its pages fault in.

        Whoever reads waits for the fence first.
        """
        block = lease.block
        with self._lock:
            self._sweep()
            self._come(block)
            before = [fence for fence in (home, block.last, self._returned) if fence is not None]
        if faults:
            block.last = self._lanes.issue(Lane.COPY_IN, before, lambda: None)
        else:
            block.last = self._move(block, Lane.COPY_IN, before)
        return block.last

    def read(self, lease: Lease) -> None:
        """Note that the current stream reads a block from now on."""
        stream = current_stream(self._lanes.device)
        if stream is not None:
            lease.block.readers.add(stream)

    def give_back(self, block: Block) -> None:
        """Take a block back that nobody holds any more. Finalizers call it, so it takes no lock."""
        self._dropped.append(block)
        if self._closed:
            with suppress(Exception):  # at the end of the process the driver is gone
                self._free_dropped()

    def sweep(self) -> None:
        """Make blocks that were given back free for others."""
        with self._lock:
            self._sweep()

    def reset_peaks(self) -> None:
        """Count peaks from now on."""
        with self._lock:
            self._sweep()
            self.peak_here_bytes = self.here_bytes
            self.peak_parked_bytes = self.parked_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of all blocks, used or not."""
        return self._blocks.total_bytes

    def close(self) -> None:
        """Give all blocks back, those that tensors still lie on once these are gone. Idempotent."""
        with self._lock:
            self._sweep()
            self._closed = True
            self._lanes.drain()
            self._blocks.close()
            self._keep_back(0)
        # One may have been given back since the sweep.
        self._free_dropped()

    def _free_dropped(self) -> None:
        # By whichever thread comes first.
        with suppress(IndexError):
            while True:
                self._blocks.release(self._dropped.popleft())

    def _sweep(self) -> None:
        while self._dropped:
            block = self._dropped.popleft()
            if block.here:
                before = [self._reached(stream) for stream in block.readers]
                before += [block.last] if block.last is not None else []
                block.last = self._move(block, Lane.COPY_OUT, before, discard=True)
                self._returned = block.last
                self._go(block)
            block.readers.clear()
            self.parked_bytes -= block.used
            self._blocks.put(block)

    def _reached(self, stream: torch.cuda.Stream) -> Fence:
        # Not the stream itself as a context: the caller may be inside it.
        with torch.cuda.stream(stream):
            return self._lanes.present()

    def _move(
        self, block: Block, lane: Lane, after: list[Fence], *, discard: bool = False
    ) -> Fence:
        return self._lanes.issue(lane, after, self._prefetch, block, lane, discard)

    def _prefetch(self, block: Block, lane: Lane, discard: bool) -> None:
        here, stream = lane is Lane.COPY_IN, self._lanes.handle(lane)
        self._driver.prefetch(block.pointer, block.used, here=here, discard=discard, stream=stream)

    def _come(self, block: Block) -> None:
        if not block.here:
            block.here = True
            self.here_bytes += block.used
            self.peak_here_bytes = max(self.peak_here_bytes, self.here_bytes)

    def _go(self, block: Block) -> None:
        if block.here:
            block.here = False
            self.here_bytes -= block.used
