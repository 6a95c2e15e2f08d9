"""Calls of roots that run as plain PyTorch although they have gradients, and why."""

from __future__ import annotations

import torch

from belady.measure.uninitialized import why_uninitialized
from belady.memory.apart import capturing


def why_plain(module: torch.nn.Module) -> str:
    """Why a call of ``module`` with gradients can be no pass, as a sentence; empty if it can."""
    name = type(module).__name__
    # The parameters of a call inside a transform may be stand-ins without storages.
    if torch._C._are_functorch_transforms_active():
        return f"calls of {name} inside a transform of torch.func (vmap, grad) run as plain PyTorch"
    # What is captured would copy to host memory that is somebody else's when it is launched.
    if capturing():
        return f"calls of {name} that a CUDA graph captures run as plain PyTorch"
    return why_uninitialized(module)
