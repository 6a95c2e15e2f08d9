"""Anonymous host memory: mapped, touched, and registered with CUDA."""

from __future__ import annotations

import contextlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from belady.errors import TierFullError
from belady.memory.extents import PAGE

_TOUCH_PIECE = 32 * 2**20
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not the current one alone


def touch(view: torch.Tensor) -> None:
    """Fault every page in, in parallel; each piece is small enough to stay on its thread."""
    pages = view[::PAGE]
    size = _TOUCH_PIECE // PAGE
    pieces = [pages[at : at + size] for at in range(0, pages.numel(), size)]
    if len(pieces) == 1:
        pieces[0].zero_()
        return
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1, len(pieces))) as pool:
        list(pool.map(torch.Tensor.zero_, pieces))


class Pages:
    """How slabs are made: the seam that tests replace to inject faults."""

    def map(self, nbytes: int) -> mmap.mmap:
        """Map ``nbytes`` of private anonymous memory, on huge pages where they exist."""
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Advice only: a kernel built without huge pages refuses it.
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def pin(self, address: int, nbytes: int) -> None:
        """Keep the mapping in memory for the device; pageable memory needs nothing."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""


class PinnedPages(Pages):
    """Pages registered with CUDA."""

    def pin(self, address: int, nbytes: int) -> None:
        """Register the mapping.

        Raises
        ------
        TierFullError
            If CUDA refuses.
        """
        cudart = _cudart()
        code = cudart.cudaHostRegister(address, nbytes, _PORTABLE)
        if int(code) == 0:
            return
        reason = cudart.cudaGetErrorString(code)
        _clear_cuda_error()
        raise TierFullError(
            f"CUDA could not pin {nbytes} bytes of host memory: {reason} ({int(code)}); "
            f"lower host_budget, or raise the limit on locked memory (ulimit -l)"
        )

    def unpin(self, address: int) -> None:
        """Unregister the mapping."""
        if int(_cudart().cudaHostUnregister(address)) != 0:
            _clear_cuda_error()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_cuda_error() -> None:
    # A failed runtime call leaves its code behind, and the next kernel launch of the user
    # would report it. torch binds no cudaGetLastError; a launch of our own takes the blame.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
