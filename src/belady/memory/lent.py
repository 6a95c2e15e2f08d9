"""Memory of a pool of torch's allocator as one thread's, for a while."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from belady.simulate.stretch import Event

_Pool = tuple[int, int]
# Of each thread that has one.
_OPEN: dict[int, Lent] = {}


class Lent:
    """What the calling thread takes comes from a pool, and its work goes to a stream, from now on.

    Torch gives a block of a pool to the stream alone that has taken it first, so these go together.

    Parameters
    ----------
    stream
        That which the blocks of the pool are for.
    """

    def __init__(self, device: torch.device, pool: _Pool, stream: torch.cuda.Stream) -> None:
        self._device, self._pool, self._stream = device, pool, stream
        self._thread, self._before = threading.get_ident(), torch.cuda.current_stream(device)
        _OPEN[self._thread] = self
        stream.wait_stream(self._before)
        self._use(stream)
        torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, pool)

    def end(self) -> bool:
        """No more; whether that was still so, and it is the thread that began which ends it.

        A thread that goes on with another stream by now, as an error has led it out of a block,
        keeps that one.
        """
        if _OPEN.get(self._thread) is not self:
            return False
        del _OPEN[self._thread]
        torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        torch._C._cuda_releasePool(self._device.index, self._pool)
        if threading.get_ident() != self._thread:
            return False
        now = torch.cuda.current_stream(self._device)
        if now == self._stream:
            self._use(self._before)
        else:
            now.wait_stream(self._stream)
        self._before.wait_stream(self._stream)
        return True

    def _use(self, stream: torch.cuda.Stream) -> None:
        # A stream brings its device with it.
        with torch.cuda.device(self._device):
            torch.cuda.set_stream(stream)


def is_lent() -> bool:
    """Whether the calling thread takes from a pool."""
    return threading.get_ident() in _OPEN


def take_back() -> None:
    """End what the calling thread was lent, whoever did: an error has kept them from it."""
    if is_lent():
        _OPEN[threading.get_ident()].end()


def blocks_held(pool: _Pool) -> frozenset[int]:
    """Addresses of the blocks of a pool that somebody has."""
    segments = torch.cuda.memory_snapshot(pool)  # type: ignore[no-untyped-call]
    return frozenset(
        block["address"]
        for it in segments
        for block in it["blocks"]
        if block["state"] != "inactive"
    )


def come_and_go(events: Sequence[Event], device: torch.device) -> None:
    """Take and give back blocks in this order.

    Raises
    ------
    torch.OutOfMemoryError
        If one finds no room.
    """
    held: dict[int, torch.Tensor] = {}
    for block, nbytes in events:
        held.pop(block, None)
        if nbytes:
            held[block] = torch.empty(nbytes, dtype=torch.uint8, device=device)
