"""cuBLAS's workspaces, which its first products take wherever there is memory and never give back.

Torch keeps one for each thread that calls cuBLAS and each stream, of 32 MiB on an H100 or H200
(ATen/cuda/CublasHandlePool.cpp). In the midst of what activations are cut from they part it in two,
and where there is nothing before them, torch maps that again instead of more at the end
(``find_expandable_block`` in c10/cuda/CUDACachingAllocator.cpp takes the lowest address).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch.utils._python_dispatch import _disable_current_modes

from belady.memory.apart import others_have_pools
from belady.memory.thread import in_backward

# Bytes of those that were given up and have not come back, by the device's number.
_GIVEN_UP: dict[int | None, int] = {}


def give_up(device: torch.device) -> None:
    """Have cuBLAS forget its workspaces, until it needs them or they are `put_first`."""
    torch.cuda.synchronize(device)
    _GIVEN_UP[device.index] = max(_GIVEN_UP.get(device.index, 0), _forget(device))


def put_first(device: torch.device, forget: Callable[[], None]) -> None:
    """Have the workspaces that this device has taken where memory begins.

    Those of the calling thread and of autograd's come back at once, of the current stream, also
    where they were given up; others when they are needed. Nothing may run in another thread
    meanwhile. Where somebody else keeps memory apart they stay: a graph of CUDA's may have been
    captured with their addresses.

    Parameters
    ----------
    forget
        Called when they are given back: has torch's allocator forget what is free.
    """
    if others_have_pools(device):
        forget()
        return
    had = max(_GIVEN_UP.pop(device.index, 0), _forget(device))
    forget()
    # Without memory for them, or in a mode that refuses products, they come when they are needed.
    with suppress(RuntimeError):
        _take(device, had)


def take_for_capture(device: torch.device) -> None:
    """Have those that were given up taken here, of the current stream, which is captured.

    They are of that capture: they go with the next call of `give_up`.
    """
    _take(device, _GIVEN_UP.get(device.index, 0))


def _take(device: torch.device, nbytes: int) -> None:
    """Have the calling thread's workspace, and autograd's if that is not all of ``nbytes``."""
    before = torch.cuda.memory_allocated(device)
    with _disable_current_modes(), torch.inference_mode(False):
        if nbytes:
            _multiply(device)
        if 0 < torch.cuda.memory_allocated(device) - before < nbytes:
            in_backward(device, partial(_multiply, device))


def _forget(device: torch.device) -> int:
    """Bytes that are free then."""
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device)


def _multiply(device: torch.device) -> None:
    some = torch.ones(16, 16, device=device)
    torch.mm(some, some)
