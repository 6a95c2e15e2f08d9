"""Making a budget of device memory real, and undoing it."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
from collections.abc import Callable

import torch

_MIB = 2**20
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def enforce(device: torch.device, budget_bytes: int) -> Callable[[], None]:
    """Let ``device`` hold no more than ``budget_bytes`` for torch; gives what undoes it.

    CUDA: torch's allocator refuses to reserve more. It is also told to use expandable segments,
    unless the user configured it: a plan takes and gives back buffers of many sizes, and whole
    segments leave up to a fifth of a small budget in pieces that fit nothing.

    CPU: glibc is told to return freed tensors to the system at once. That cannot be undone.
    """
    if device.type == "cpu":
        _return_freed_memory()
        return lambda: None
    torch.cuda.empty_cache()
    configured = any(os.environ.get(name) for name in _VARIABLES)
    if not configured:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), device)

    def undo() -> None:
        torch.cuda.set_per_process_memory_fraction(before, device)
        if not configured:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")

    return undo


@functools.cache
def _return_freed_memory() -> None:
    """Make a budget of RAM real: by default glibc keeps freed tensors below a moving threshold."""
    name = ctypes.util.find_library("c")
    library = ctypes.CDLL(name) if name else None
    if library is not None and hasattr(library, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        library.mallopt(mmap_threshold, _MIB)
        library.mallopt(trim_threshold, _MIB)
