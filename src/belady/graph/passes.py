"""Which calls of roots are captured; all others run as plain PyTorch."""

from __future__ import annotations

import torch


def is_pass() -> bool:
    """Whether a call is to be managed: no inference, no capture of its own."""
    return (
        torch.is_grad_enabled()
        # A captured graph would copy to host memory that is somebody else's when it replays.
        and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )
