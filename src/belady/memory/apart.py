"""Device memory apart from what everything else is cut from."""

from __future__ import annotations

from contextlib import suppress

import torch

# Of all that were made: those of others may be of graphs of CUDA's that somebody captured.
_POOLS: set[tuple[int, int]] = set()


def others_have_pools(device: torch.device) -> bool:
    """Whether somebody else keeps memory of ``device`` apart, as graphs that were captured do."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    pools = {tuple(it["segment_pool_id"]) for it in segments if it["device"] == device.index}
    return not pools <= {(0, 0), *_POOLS}


def count_as_ours(pool: tuple[int, int]) -> None:
    """Have `others_have_pools` leave a pool out."""
    _POOLS.add(pool)


class Apart:
    """A pool of torch's allocator that holds only the copies made here.

    Its bytes count in what torch reserves on the device. What still lives in it when it is closed
    goes on living and is given back when it dies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: torch.cuda.MemPool | None = None
        self._held_bytes = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy with the same strides, in stream order; None when there is no room for it."""
        device = self._device
        if tensor.device != device or device.type != "cuda" or capturing():
            return None
        if self._pool is None:
            self._pool = _new_pool()
        try:
            with torch.cuda.use_mem_pool(self._pool, device):
                return tensor.clone(memory_format=torch.preserve_format)
        except torch.OutOfMemoryError:
            # A private pool cannot make the allocator flush its cache; where it is, it fits.
            return None

    def hold(self, nbytes: int) -> None:
        """Have memory for copies of that many bytes at once, where there is room for it.

        What is set aside near a cap leaves no room for a pool that grows. One that has grown by
        copies that were made has what it needs.
        """
        grown = self._pool is not None and not self._held_bytes
        if self._device.type != "cuda" or nbytes <= self._held_bytes or grown or capturing():
            return
        pool = self._pool or _new_pool()
        # In a pool, torch does not give up what it has cached elsewhere.
        torch.cuda.empty_cache()
        with suppress(torch.OutOfMemoryError), torch.cuda.use_mem_pool(pool, self._device):
            torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._pool, self._held_bytes = pool, nbytes

    def close(self) -> None:
        """Let go of the pool."""
        self._pool, self._held_bytes = None, 0


def _new_pool() -> torch.cuda.MemPool:
    pool = torch.cuda.MemPool()
    count_as_ours(pool.id)
    return pool


def capturing() -> bool:
    """Whether what this thread issues is captured."""
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return begun and torch.cuda.is_current_stream_capturing()
