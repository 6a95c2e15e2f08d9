"""A file of a user's, whose functions forwards call."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

KEPT: list[Tensor] = []
COUNT = 0


@functools.cache
def ramp(size: int) -> Tensor:
    """Of numbers from 0 on."""
    return torch.arange(size)


def change(h: Tensor) -> Tensor:
    """Leave something here."""
    global COUNT
    COUNT += 1
    KEPT.append(h.detach())
    return h * ramp(h.shape[-1])
