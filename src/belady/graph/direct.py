"""Functions of torch's for operators of a graph: the same call, with less work for the host.

An overload of an operator is called through a stack of boxed values, into which every list of sizes
is copied number by number; the function that plain PyTorch calls parses its arguments in place. The
difference is largest for convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten

# Those of which the function takes the same arguments in the same places and leads nowhere else.
# cuDNN's norm gains nothing by its function.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.addmm.default: torch.addmm,
    _aten.bmm.default: torch.bmm,
    _aten.cat.default: torch.cat,
    _aten.convolution.default: torch.convolution,
    _aten.detach.default: torch.Tensor.detach,
    _aten.expand.default: torch.Tensor.expand,
    _aten.max_pool2d_with_indices.default: torch._C._nn.max_pool2d_with_indices,
    _aten.mm.default: torch.mm,
    _aten.mul.Tensor: torch.mul,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten.permute.default: torch.permute,
    _aten.relu.default: torch.relu,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.sum.dim_IntList: torch.sum,
    _aten.t.default: torch.t,
    _aten.tanh.default: torch.tanh,
    _aten.transpose.int: torch.transpose,
    _aten.view.default: torch.Tensor.view,
}


def function_of(target: Any) -> Any:
    """What to call for a node's target; an operator without its Python frame at least."""
    if isinstance(target, torch._ops.OpOverload):
        return _FUNCTIONS.get(target, target._op)
    return target
