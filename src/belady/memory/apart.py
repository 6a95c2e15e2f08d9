"""Device memory apart from what everything else is cut from."""

from __future__ import annotations

from contextlib import suppress

import torch


class Apart:
    """A pool of torch's allocator that holds only the copies made here.

    Its bytes count in what torch reserves on the device. What still lives in it when it is closed
    goes on living and is given back when it dies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: torch.cuda.MemPool | None = None

    def copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy with the same strides, in stream order; None when there is no room for it."""
        device = self._device
        if tensor.device != device or device.type != "cuda" or _capturing():
            return None
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        try:
            with torch.cuda.use_mem_pool(self._pool, device):
                return tensor.clone(memory_format=torch.preserve_format)
        except torch.OutOfMemoryError:
            # A private pool cannot make the allocator flush its cache; where it is, it fits.
            return None

    def hold(self, nbytes: int) -> None:
        """Have memory for copies of that many bytes, unless there are some, or there is no room.

        What is set aside near a cap leaves no room for a pool that grows.
        """
        if self._pool is None and self._device.type == "cuda" and nbytes and not _capturing():
            self._pool = torch.cuda.MemPool()
            # The other cache is not given up for it in a pool.
            torch.cuda.empty_cache()
            pooled = torch.cuda.use_mem_pool(self._pool, self._device)
            with suppress(torch.OutOfMemoryError), pooled:
                torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """Let go of the pool."""
        self._pool = None


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()
