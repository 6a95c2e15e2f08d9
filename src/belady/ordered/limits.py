"""Which calls may go in the coordinated order, whatever the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

# What tensors without bytes stand for; a subclass of the user's may mean anything.
_TENSORS = (Tensor, nn.Parameter, FakeTensor)


def may_differ(layer: Any, x: Any) -> bool:
    """Whether a call of ``layer`` may make other nodes of autograd's graph than plain PyTorch."""
    return bool(
        torch.is_grad_enabled()
        and is_plain(x)
        and x.requires_grad
        and x.numel() > 0
        and x.device.type in ("cpu", "cuda")
        and not _watched_otherwise(layer)
    )


def is_plain(tensor: Any) -> bool:
    """Whether it is a tensor of torch's own that holds its numbers as floats with strides."""
    return bool(
        type(tensor) in _TENSORS
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_floating_point()
    )


def _watched_otherwise(layer: Any) -> bool:
    """Whether somebody differentiates in another way, or looks at the last node of the layer."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or layer._is_full_backward_hook is False
    )
