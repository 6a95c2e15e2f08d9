"""Bytes spilled to disk: extents of one private file, moved by a few threads."""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from belady.errors import SpillError, TierFullError
from belady.memory.extents import PAGE, Extents, round_up
from belady.memory.files import Bytes, Files, SpillFile
from belady.memory.tickets import Extent, Ticket

SMALLEST_GROWTH = 2 * 2**20
LARGEST_GROWTH = 256 * 2**20

# Writes or reads the bytes of one part, given its offset in the file and its place in memory.
Work = Callable[[int, slice, Bytes], None]


def _crc(data: Bytes) -> int:
    return zlib.crc32(data.data)


def _no_sum(data: Bytes) -> int:
    return 0


class DiskStore:
    """Spilled bytes under a budget. Thread-safe; a forked child must not use it.

    Parameters
    ----------
    directory
        Folder on a disk; None is the system's folder for temporary files.
    budget_bytes
        Most bytes that extents may take, in whole pages; None is no limit but the disk's.
    checksum
        Whether every chunk is checked against its CRC-32 when it is read.
    threads
        Reads and writes under way at once.
    files
        The operating system's calls.
    allow_ram
        Whether a folder backed by memory is accepted.

    Raises
    ------
    SpillError
        If the folder cannot be used.
    """

    def __init__(
        self,
        directory: str | None = None,
        budget_bytes: int | None = None,
        checksum: bool = False,
        threads: int = 4,
        *,
        files: Files | None = None,
        allow_ram: bool = False,
    ) -> None:
        self._file = SpillFile(directory, files or Files(), allow_ram)
        self._budget = None if budget_bytes is None else budget_bytes // PAGE * PAGE
        self._sum = _crc if checksum else _no_sum
        self._extents = Extents()
        self._file_bytes = 0
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="belady-disk")
        # A store that is dropped unclosed gives its file back; at exit the system does.
        weakref.finalize(self, self._file.close).atexit = False
        self.used_bytes = 0
        self.peak_bytes = 0

    @property
    def direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self._file.direct

    @property
    def directory(self) -> str:
        """The spill folder, resolved."""
        return self._file.directory

    def allocate(self, nbytes: int) -> Extent:
        """Set ``nbytes`` bytes aside.

        Raises
        ------
        TierFullError
            If the budget or the disk is used up.
        SpillError
            If the file cannot grow for another reason, or the store is closed.
        """
        self._check_usable()
        held = round_up(nbytes)
        with self._lock:
            if self._budget is not None and self.used_bytes + held > self._budget:
                raise TierFullError(
                    f"{held} bytes of disk are needed; the budget is {self._budget} bytes, of "
                    f"which {self.used_bytes} are used"
                )
            missing = held - self._extents.free_bytes
            if missing > 0:
                self._grow(missing)
            ranges = self._extents.gather(held) or []
            self.used_bytes += held
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return Extent(nbytes, ranges)

    def write(self, data: memoryview | torch.Tensor, extent: Extent | None = None) -> Ticket:
        """Start to write ``data`` to ``extent``, or to a new one; once for each extent.

        ``data`` must not change before the ticket has ended.

        Raises
        ------
        TierFullError, SpillError
            As `allocate`.
        """
        self._check_usable()
        source = _array(data)
        it = extent if extent is not None else self.allocate(source.size)
        ticket = it.written = Ticket("writing", it, len(it.chunks()), source)

        def work(offset: int, part: slice, source: Bytes) -> None:
            it.sums[offset] = self._sum(source[part])
            self._file.write(offset, source[part])

        self._start(ticket, work)
        return ticket

    def read(self, extent: Extent, into: memoryview | torch.Tensor) -> Ticket:
        """Start to read ``extent`` into ``into``, after the write of it has ended.

        Raises
        ------
        ValueError
            If the sizes differ or the extent was never written.
        SpillError
            If the store is closed.
        """
        self._check_usable()
        target = _array(into)
        written = extent.written
        if target.size != extent.nbytes or written is None:
            raise ValueError(f"{extent.describe()} cannot be read into {target.size} bytes")
        ticket = Ticket("reading", extent, len(extent.chunks()), target)
        with self._lock:
            extent.reads = [*(read for read in extent.reads if not read.ended), ticket]

        def work(offset: int, part: slice, target: Bytes) -> None:
            # No deadlock: the parts of the write were queued before, so they are running.
            written.settle()
            if written.error is not None:
                raise written.error
            self._file.read(offset, target[part])
            if self._sum(target[part]) != extent.sums[offset]:
                raise OSError(f"checksum mismatch at offset {offset}: the disk changed the data")

        self._start(ticket, work)
        return ticket

    def free(self, extent: Extent) -> None:
        """Give ``extent`` back, after the reads and writes of it have ended. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._lock:
            under_way = list(extent.reads)
        if extent.written is not None:
            under_way.append(extent.written)
        for ticket in under_way:
            ticket.settle()
        with self._lock:
            if extent.freed:
                return
            extent.freed = True
            for part in extent.ranges:
                self._extents.give(part.start, part.nbytes)
                self.used_bytes -= part.nbytes
        # Tickets know their extent: what is over is not left to the garbage collector.
        extent.reads = []
        if extent.written is not None and extent.written.error is None:
            extent.written = None

    def free_all(self, extents: Iterable[Extent]) -> None:
        """Give several extents back."""
        for extent in extents:
            self.free(extent)

    def reset_peak(self) -> None:
        """Start a new peak from what is used now."""
        with self._lock:
            self.peak_bytes = self.used_bytes

    def close(self) -> None:
        """Wait for what is under way, end the threads and drop all bytes. Idempotent."""
        if os.getpid() != self._process:
            return
        self._closed = True
        self._pool.shutdown(wait=True)
        self._file.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise SpillError("the spill store is closed")
        if os.getpid() != self._process:
            raise SpillError("a forked process cannot use the spill store of its parent")

    def _grow(self, missing: int) -> None:
        step = min(max(self._file_bytes, SMALLEST_GROWTH), LARGEST_GROWTH)
        wanted = max(missing, step)
        if self._budget is not None:
            wanted = min(wanted, self._budget - self._file_bytes)
        try:
            self._file.grow(self._file_bytes, wanted)
        except TierFullError:
            if wanted == missing:
                raise
            wanted = missing
            self._file.grow(self._file_bytes, wanted)
        self._extents.give(self._file_bytes, wanted)
        self._file_bytes += wanted

    def _start(self, ticket: Ticket, work: Work) -> None:
        for offset, part in ticket.extent.chunks():
            try:
                self._pool.submit(_run, ticket, work, offset, part)
            except RuntimeError as error:  # the interpreter or the store is shutting down
                ticket.end_part(error)


def _run(ticket: Ticket, work: Work, offset: int, part: slice) -> None:
    error: BaseException | None = None
    ticket.begin_part()
    try:
        # The ticket alone holds the bytes, and lets go of them before a waiter goes on: memory
        # that a worker would let go of a moment later would die at another op in every iteration.
        work(offset, part, ticket.data)
    except BaseException as raised:  # whatever it is, the waiter must hear of it
        error = raised
    ticket.end_part(error)


def _array(data: memoryview | torch.Tensor) -> Bytes:
    """View bytes in place; the view keeps the memory alive."""
    if isinstance(data, torch.Tensor):
        array: Bytes = data.detach().numpy()
    else:
        array = np.frombuffer(data, dtype=np.uint8) if data.nbytes else np.empty(0, np.uint8)
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError("spilled data must be one-dimensional contiguous bytes")
    return array
