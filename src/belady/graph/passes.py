"""Which calls of roots are captured; all others run as plain PyTorch."""

from __future__ import annotations

import torch

from belady.memory.apart import capturing


def is_pass() -> bool:
    """Whether a call is to be managed: no inference, no capture of its own."""
    # What is captured would copy to host memory that is somebody else's when it is launched.
    return torch.is_grad_enabled() and not capturing()
