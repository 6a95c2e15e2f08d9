"""Memory of a pool of torch's allocator as one thread's, for a while."""

from __future__ import annotations

import threading

import torch

from belady.memory.streams import current_stream

_Pool = tuple[int, int]


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
        self._thread, self._before = threading.get_ident(), current_stream(device)
        if self._before is not None:
            stream.wait_stream(self._before)
        self._use(stream)
        torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, pool)

    def end(self) -> bool:
        """No more; whether that is the thread that began. Another one keeps its stream."""
        torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        torch._C._cuda_releasePool(self._device.index, self._pool)
        same = threading.get_ident() == self._thread
        if same and self._before is not None:
            self._use(self._before)
            self._before.wait_stream(self._stream)
        return same

    def _use(self, stream: torch.cuda.Stream) -> None:
        # A stream brings its device with it.
        with torch.cuda.device(self._device):
            torch.cuda.set_stream(stream)


def blocks_held(pool: _Pool) -> frozenset[int]:
    """Addresses of the blocks of a pool that somebody has."""
    segments = torch.cuda.memory_snapshot(pool)  # type: ignore[no-untyped-call]
    return frozenset(
        block["address"]
        for it in segments
        for block in it["blocks"]
        if block["state"] != "inactive"
    )
