"""What convolutions may ask for beside their operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

# Most workspace of cuDNN's algorithms with tensor cores and without, in NCHW and in channels_last,
# of input, weight and output (H200; `python -m benchmarks kernels --question convolution`). With
# tensor cores these are laid out anew: of a ResNet's convolutions too it is their sum, if any.
# Without, it was measured where input and output are equal, and is taken to be so elsewhere.
WITH_TENSOR_CORES, _WITHOUT = (1.0, 0.0), (3.15, 4.15)


def workspace_share(module: nn.Module, call: tuple[Any, Any], device: torch.device) -> float:
    """What a convolution may ask for, of input, weight and output; nothing on a CPU."""
    if device.type != "cuda":
        return 0.0
    parameters = list(module.parameters())
    halves = any(it.dtype in (torch.float16, torch.bfloat16) for it in parameters)
    reduced = torch.backends.cudnn.allow_tf32 or torch.is_autocast_enabled("cuda") or halves
    return (WITH_TENSOR_CORES if reduced else _WITHOUT)[is_channels_last(module, call)]


def is_channels_last(module: nn.Module, call: tuple[Any, Any]) -> bool:
    """Whether cuDNN takes the images of a call with channels last."""
    # One operand is enough for it to take both so.
    given = [it for it in tree_leaves(call) if isinstance(it, torch.Tensor)]
    # A parametrized weight is made where it is looked up as an attribute, which has effects.
    held = (it._parameters.get("weight") for it in module.modules() if isinstance(it, _ConvNd))
    weights = [it for it in held if it is not None]
    return any(map(_is_channels_last, (*given, *weights)))


def _is_channels_last(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dim() not in (4, 5):
        return False
    return suggest_memory_format(tensor) is not torch.contiguous_format
