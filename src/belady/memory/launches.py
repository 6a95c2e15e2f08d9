"""What a host issues once and a device runs again and again: CUDA graphs, and memory for them.

A kernel can take a host longer to issue than a device to run. All that a part of an iteration
issues can be launched at once (CUDA C++ Programming Guide, "CUDA Graphs"); what it reads and writes
lies where it lay when it was captured.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import TypeVar

import torch

from belady.memory.apart import count_as_ours, others_have_pools
from belady.memory.cap import (
    PAGE_BYTES,
    SMALL_PAGE_BYTES,
    WALL_BYTES,
    set_aside,
    tear_down,
    walls,
)
from belady.memory.capturing import LackingError
from belady.memory.extents import round_up
from belady.memory.filling import Filling, PoolMemory
from belady.memory.lent import Lent, blocks_held, come_and_go, is_lent, take_back
from belady.memory.streams import current_stream
from belady.memory.workspaces import give_up, take_for_capture
from belady.simulate.holes import Holes
from belady.simulate.packing import Packing, held_bytes
from belady.simulate.stretch import Event

T = TypeVar("T")

# Times that a pool may grow until all that is to fit into it comes to lie as before.
_GROWS = 4


class Launches:
    """Captures what is issued to a CUDA device; all of it has one pool of torch's allocator.

    Captures share the pool as if they ran one after another, so they are launched in that order:
    what one of them has let go of, a later one, and the first one of the next round, write into.

    Parameters
    ----------
    device
        With its index.
    holes
        What a pool begins with that has all of its room at once: holes of so many bytes, behind
        each of which lies what it does not hold, and the rest. None: it grows as it is used.
    room_bytes
        The most that the device may reserve then, for all.
    packing
        Of all blocks that come, where there are no walls.

    Attributes
    ----------
    peak_bytes
        Most bytes allocated at once, of all that is there, once all is captured.
    """

    def __init__(
        self,
        device: torch.device,
        holes: Holes | None = None,
        room_bytes: int = 0,
        packing: Packing | None = None,
    ) -> None:
        self._device, self.holes = device, holes
        self._room_bytes, self._packing = room_bytes, packing
        self._beside_bytes = self._small_bytes = 0
        self._walls: list[torch.Tensor] = []
        self.peak_bytes = 0
        self._latest: torch.cuda.Stream | None = None
        # Workspaces of a capture are of that one, and no other's; what is free elsewhere, the pool
        # is not given.
        take_back()
        tear_down(device)
        give_up(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self._stream = _stream_of(device, threading.get_ident())
        self._pool = torch.cuda.graph_pool_handle()
        self._held = frozenset[int]()
        count_as_ours(self._pool)

    def capture(self, issue: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Have ``issue`` issued without being run; what launches it, and what it gives.

        The launch goes to the stream that is current then. Tensors that ``issue`` makes have no
        contents before the first launch.

        Raises
        ------
        RuntimeError
            If something cannot be captured, as what waits for the device.
        torch.OutOfMemoryError
            If the pool cannot grow. Nothing that is free elsewhere is given up for it.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # Other threads go on: one that pins memory for a loader would end a global capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                given = issue()
            except BaseException:
                # Copies on their way on other streams end it, too; and torch warns of an empty one.
                with suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
                    self._end(graph)
                raise
            self._end(graph)
        return partial(self._launch, graph.replay), given

    def _launch(self, replay: Callable[[], None]) -> None:
        self.follow()
        replay()

    def follow(self) -> None:
        """Have the current stream wait for what was launched: one writes where another reads."""
        stream = current_stream(self._device)
        if stream is not None and self._latest is not None and stream is not self._latest:
            stream.wait_stream(self._latest)
        self._latest = stream

    def divide(self) -> Filling | None:
        """Have the pool begin here, while the first part is issued to be captured.

        Under a cap torch maps more at the end of a piece only where there is room for all that is
        asked for, however much of it is free there: so what a pool is to have it is given at once.

        Raises
        ------
        LackingError
            If there is no room for all that is packed.
        """
        packs = self._packing is not None
        if packs:
            take_for_capture(self._device)
            self._check_room()
        if self.holes is not None:
            # Small blocks have pages of their own.
            set_aside(self._device, min(self._room_bytes, self._wanted()) - PAGE_BYTES)
            # All of it was held for a moment.
            torch.cuda.reset_peak_memory_stats(self._device)
        if not packs:
            # In the midst of all that comes and goes they would part it in two.
            take_for_capture(self._device)
        self._walls = walls(self._device, self.holes or ())
        self._beside_bytes = torch.cuda.memory_allocated(self._device)
        self._small_bytes = _small_bytes(self._device, "current")
        memory = PoolMemory(self._device, self._pool)
        return None if self._packing is None else Filling(memory, self._packing)

    def _wanted(self) -> int:
        """What is to be reserved in all: no more than blocks need that are packed."""
        if self._packing is None:
            return self._room_bytes
        reserved = torch.cuda.memory_reserved(self._device)
        return reserved + self._packing.end + WALL_BYTES + 2 * PAGE_BYTES

    def _check_room(self) -> None:
        # To find out as blocks come takes as long as a capture does.
        assert self._packing is not None
        large = round_up(self._packing.end + WALL_BYTES, PAGE_BYTES)
        # As much stays unused at least, see `divide`.
        small = max(PAGE_BYTES, round_up(self._packing.small_bytes, SMALL_PAGE_BYTES))
        lacking = self.reserved_bytes + large + small - self._room_bytes
        if lacking > 0:
            raise LackingError(lacking)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture, also one that the driver has ended because of what was issued.

        Torch then leaves its allocator, and its random generator, as if it went on.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            index = self._device.index
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
            # The end of any other capture puts the generator right.
            another = torch.cuda.CUDAGraph()
            another.capture_begin(capture_error_mode="thread_local")
            try:
                torch.empty(1, device=self._device).zero_()
            finally:
                another.capture_end()
            raise

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of ``tensor``, without holding them: others may be given them.

        Of one of the pool to be used while this object lives, and in between launches that have not
        yet, or no longer, given them to others; of any other while whoever it belongs to holds it.
        """
        storage = tensor.untyped_storage()
        bytes_ = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), storage.device, storage.nbytes()
        )
        seen = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return seen.set_(bytes_, tensor.storage_offset(), tensor.shape, tensor.stride())

    def over(self) -> None:
        """All is captured."""
        self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        if self._packing is not None:
            # What fills holes is none of it, and small blocks are none of those that are packed.
            small = _small_bytes(self._device, "peak") - self._small_bytes
            self.peak_bytes = self._beside_bytes + held_bytes(self._packing.lives) + small
            torch.cuda.reset_peak_memory_stats(self._device)
        self._walls.clear()
        give_up(self._device)
        self._held = blocks_held(self._pool)

    def lend(self) -> Callable[[], bool]:
        """Have what this thread takes come from what is idle of the pool, until that is called.

        Only once all is captured, and between two rounds of launches: after the last one of a round
        the pool holds what that has given, and nothing else of it has to stay. Torch gives its
        blocks to the stream that has taken them first, so work goes to that of captures meanwhile.
        What is then called says whether all that was taken has been given back: the next round
        writes over what has not.

        Raises
        ------
        torch.OutOfMemoryError
            Meanwhile, for what finds no room: nothing that is free elsewhere is given up for it.
        """
        if is_lent():
            # An optimizer of two vms has that of one of them.
            return lambda: True
        self.follow()
        lent = Lent(self._device, self._pool, self._stream)
        return lambda: lent.end() and blocks_held(self._pool) == self._held

    def has_room_for(self, events: Sequence[Event]) -> bool:
        """Whether blocks that come and go in this order fit into what is idle of the pool.

        It may grow by what it lacks. They will fit again, as they have come to lie in a pool that
        has not grown.
        """
        for _ in range(_GROWS):
            before, give_back = self.reserved_bytes, self.lend()
            try:
                come_and_go(events, self._device)
            except torch.OutOfMemoryError:
                return False
            finally:
                give_back()
            if self.reserved_bytes == before:
                return True
        return False

    def wait(self) -> None:
        """Block until all that was launched has run."""
        torch.cuda.synchronize(self._device)

    @staticmethod
    def forget() -> None:
        """What was captured is gone: give its memory back."""
        torch.cuda.empty_cache()

    @property
    def reserved_bytes(self) -> int:
        """What torch's allocator reserves by now, for all."""
        return torch.cuda.memory_reserved(self._device)


@cache
def _stream_of(device: torch.device, _thread: int) -> torch.cuda.Stream:
    """The stream on which a thread captures.

    Torch has a few dozen, which it gives out in turn: with one of its own for each capture, some
    would be those on which copies go.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def captures(device: torch.device) -> bool:
    """Whether a device can be told what to run by what was captured.

    Not where somebody else keeps memory apart: cuBLAS's workspaces are forgotten for a capture, and
    a graph of theirs may have been captured with them.
    """
    return device.type == "cuda" and not others_have_pools(device)


def _small_bytes(device: torch.device, of: str) -> int:
    """What blocks take that have pages of their own: now (``current``), or at most (``peak``)."""
    return int(torch.cuda.memory_stats(device)[f"allocated_bytes.small_pool.{of}"])
