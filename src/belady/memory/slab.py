"""Host memory in exact slabs that are pinned once and reused.

torch's own pinned allocator rounds each request up to a power of two and pins it on its own
(0.5 s per GiB). A slab here is an anonymous private mapping on huge pages, touched by several
threads and then registered (0.055 s per GiB), from which blocks are cut in whole pages.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from belady.errors import TierFullError
from belady.memory.extents import PAGE, Extents, round_up
from belady.memory.fences import Fence
from belady.memory.pages import Pages, PinnedPages, touch

SMALLEST_SLAB = 2 * 2**20
LARGEST_STEP = 256 * 2**20


@dataclass(eq=False, slots=True)
class _Slab:
    mapping: mmap.mmap
    view: torch.Tensor
    nbytes: int
    extents: Extents = field(default_factory=Extents)

    @property
    def address(self) -> int:
        return self.view.data_ptr()

    @property
    def empty(self) -> bool:
        return self.extents.free_bytes == self.nbytes


@dataclass(eq=False, slots=True)
class Block:
    """Bytes of a slab.

    Attributes
    ----------
    tensor
        One-dimensional uint8 view of ``nbytes`` elements, aligned to a page.
    nbytes
        Bytes asked for.
    fences
        What must pass before the block is written: copies that its former owner had issued.
        A stream waits for them, or a worker thread does; the submitting thread need not.
    """

    tensor: torch.Tensor
    nbytes: int
    fences: tuple[Fence, ...]
    _slab: _Slab | None
    _start: int
    _held: int


class HostArena:
    """Blocks of host memory under a budget. Thread-safe.

    Parameters
    ----------
    budget_bytes
        Most bytes that slabs may take, rounded down to whole pages; None is no limit.
    pin
        Whether slabs are registered with CUDA.
    pages
        How slabs are made; None picks it by ``pin``.
    """

    def __init__(self, budget_bytes: int | None, pin: bool, pages: Pages | None = None) -> None:
        self._budget = None if budget_bytes is None else budget_bytes // PAGE * PAGE
        self._pages = pages or (PinnedPages() if pin else Pages())
        self._slabs: list[_Slab] = []
        # Blocks given back, by bytes asked for: a plan takes the same sizes in every iteration, and
        # to find and to cut a range takes the host longer than all else of an allocation.
        self._ready: dict[int, list[Block]] = {}
        self._lock = threading.Lock()
        self.slab_bytes = 0
        self.used_bytes = 0
        self.peak_bytes = 0
        # Memory that is unmapped while it is registered poisons the address for CUDA.
        mine = (self._pages, self._slabs, self._ready, os.getpid())
        weakref.finalize(self, _drop, *mine).atexit = False

    def alloc(self, nbytes: int) -> Block:
        """Take a block of ``nbytes`` bytes (held in whole pages).

        Raises
        ------
        TierFullError
            If the budget, the address space or the pinnable memory is used up.
        """
        held = round_up(nbytes)
        if held == 0:
            return Block(torch.empty(0, dtype=torch.uint8, device="cpu"), 0, (), None, 0, 0)
        with self._lock:
            ready = self._ready.get(nbytes)
            block = ready.pop() if ready else self._cut(nbytes, held)
            self.used_bytes += held
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return block

    def free(self, block: Block, fences: Iterable[Fence] = ()) -> None:
        """Give ``block`` back. Idempotent.

        Parameters
        ----------
        fences
            The copies that may still touch it, which have waited for the fences of the block;
            those, unless there are any.
        """
        with self._lock:
            slab, block._slab = block._slab, None
            if slab is None or slab not in self._slabs:  # the second: freed after `close`
                return
            after = tuple(fences) or block.fences
            # Another object: who frees this one twice must not free its next owner's.
            kept = Block(block.tensor, block.nbytes, after, slab, block._start, block._held)
            self._ready.setdefault(block.nbytes, []).append(kept)
            self.used_bytes -= block._held

    def reserve(self, nbytes: int) -> None:
        """Make the slabs hold at least ``nbytes`` bytes now, while time is not yet counted.

        Raises
        ------
        TierFullError
            As `alloc`.
        """
        with self._lock:
            missing = round_up(nbytes) - self.slab_bytes
            if missing > 0:
                self._join()
                self._add_slab(self._within_budget(missing, missing))

    def reset_peak(self) -> None:
        """Start a new peak from what is used now."""
        with self._lock:
            self.peak_bytes = self.used_bytes

    def close(self) -> None:
        """Unpin and unmap everything; copies of blocks still held must have ended. Idempotent.

        A mapping whose block is still held somewhere is unmapped when that block dies.
        """
        with self._lock:
            self._join()
            _unpin_all(self._pages, self._slabs)
            self.slab_bytes = self.used_bytes = 0

    def _cut(self, nbytes: int, held: int) -> Block:
        slab = self._fitting(held)
        if slab is None:
            self._join()
            slab = self._fitting(held) or self._grow(held)
        part = slab.extents.take(held)
        if part is None:
            raise ValueError(f"a slab of {slab.nbytes} bytes cannot hold {held}")
        view = slab.view[part.start : part.start + nbytes]
        return Block(view, nbytes, part.fences, slab, part.start, held)

    def _join(self) -> None:
        """Make free ranges of the blocks given back, so that other sizes fit."""
        _join(self._ready)

    def _fitting(self, held: int) -> _Slab | None:
        """Slab whose smallest fitting range is the best."""
        best: tuple[int, _Slab] | None = None
        for slab in self._slabs:
            size = slab.extents.best(held)
            if size is not None and (best is None or size < best[0]):
                best = (size, slab)
        return best[1] if best else None

    def _grow(self, held: int) -> _Slab:
        step = min(max(self.slab_bytes, SMALLEST_SLAB), LARGEST_STEP)
        wanted = max(round_up(held, SMALLEST_SLAB), step)
        return self._add_slab(self._within_budget(held, wanted))

    def _within_budget(self, needed: int, wanted: int) -> int:
        if self._budget is None:
            return wanted
        if needed > self._budget - self.slab_bytes:
            self._drop_empty_slabs()
        room = self._budget - self.slab_bytes
        if needed > room:
            raise TierFullError(
                f"{needed} bytes of host memory are needed; the budget is {self._budget} bytes, "
                f"of which {self.used_bytes} are used and {self.slab_bytes} lie in slabs"
            )
        return min(wanted, room)

    def _add_slab(self, nbytes: int) -> _Slab:
        try:
            mapping = self._pages.map(nbytes)
        except OSError as error:
            raise TierFullError(f"{nbytes} bytes of host memory cannot be mapped") from error
        # An inference tensor could not be written outside inference mode later on.
        with torch.inference_mode(False):
            slab = _Slab(mapping, torch.frombuffer(mapping, dtype=torch.uint8), nbytes)
        touch(slab.view)
        self._pages.pin(slab.address, nbytes)
        slab.extents.give(0, nbytes)
        self._slabs.append(slab)
        self.slab_bytes += nbytes
        return slab

    def _drop_empty_slabs(self) -> None:
        for slab in [slab for slab in self._slabs if slab.empty]:
            self._slabs.remove(slab)
            self.slab_bytes -= slab.nbytes
            _unpin_all(self._pages, [slab])


def _join(ready: dict[int, list[Block]]) -> None:
    while ready:
        _, blocks = ready.popitem()
        for block in blocks:
            if block._slab is not None:
                block._slab.extents.give(block._start, block._held, block.fences)


def _drop(pages: Pages, slabs: list[_Slab], ready: dict[int, list[Block]], process: int) -> None:
    """Unpin for an arena that died unclosed; a forked child has no CUDA to tell."""
    if os.getpid() == process:
        _join(ready)
        _unpin_all(pages, slabs)


def _unpin_all(pages: Pages, slabs: list[_Slab]) -> None:
    """Empty ``slabs``, after the copies that former owners of their blocks had issued."""
    while slabs:
        slab = slabs.pop()
        for part in slab.extents.ranges():
            for fence in part.fences:
                fence.synchronize()
        pages.unpin(slab.address)
