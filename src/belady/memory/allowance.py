"""How much torch's allocator may take for a moment, so that cuDNN chooses an algorithm that fits.

PyTorch has no setting for the workspace of a convolution. It answers a workspace that cannot be had
with the next algorithm in cuDNN's order, and each thread keeps what worked, under a key of
operation, shapes, layout, type, alignment, ``deterministic`` and ``allow_tf32``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import nextafter

import torch

from belady.memory.cap import PAGE_BYTES

# Libraries have words of their own for an allocation that torch refused them.
_RAN_OUT = ("out of memory", "ALLOC_FAILED", "unable to find an engine")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that the device ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _RAN_OUT)


@contextmanager
def allowance(device: torch.device, nbytes: int) -> Iterator[None]:
    """Let torch take ``nbytes`` more of ``device`` than is in use now, in whole pages of 20 MiB.

    Nothing more than was allowed before can be had. Free blocks inside of pages in use can still be
    taken. The limit before is back afterwards. Nothing happens on a CPU.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    before = torch.cuda.get_per_process_memory_fraction(device)
    total = torch.cuda.get_device_properties(device).total_memory
    wanted = torch.cuda.memory_reserved(device) + pages(nbytes)
    # Upwards, or torch makes a byte less of it.
    fraction = min(before, nextafter(wanted / total, 1.0))
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def pages(nbytes: int) -> int:
    """``nbytes`` in whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
