"""The data gradient of a convolution, without the input."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# [convolution_backward] asks for the input even where it needs its geometry alone. These backends
# look at nothing else; others make copies or slices of it, which takes bytes.
_BACKENDS = torch._C._ConvBackend  # type: ignore[attr-defined]
_UNREAD = frozenset({_BACKENDS.Cudnn, _BACKENDS.Mkldnn})

_Geometry = tuple[int, ...]


class Convolution(NamedTuple):
    """Settings of a convolution, in the order in which `torch.nn.functional.conv2d` takes them."""

    stride: _Geometry
    padding: _Geometry
    dilation: _Geometry
    groups: int

    @property
    def as_op(self) -> tuple[Any, ...]:
        """The same for the aten ops, which know transposed convolutions too."""
        nothing = (0,) * len(self.stride)
        return (self.stride, self.padding, self.dilation, False, nothing, self.groups)


def data_gradient(
    gradient: Tensor, size: _Geometry, stride: _Geometry, weight: Tensor, conv: Convolution
) -> Tensor:
    """Gradient of a convolution's input of this size and stride, which need not exist any more."""
    if len(size) == 3:
        # What torch does with a convolution in one dimension.
        (n, c, length), (by_n, by_c, step) = size, stride
        size, stride = (n, c, 1, length), (by_n, by_c, length * step, step)
        flat = Convolution((1, *conv.stride), (0, *conv.padding), (1, *conv.dilation), conv.groups)
        wide = data_gradient(gradient.unsqueeze(2), size, stride, weight.unsqueeze(2), flat)
        return wide.squeeze(2)
    # One op, so that whoever counts bytes op by op sees what it leaves and not what it tries.
    stand_in = torch.ops.belady.stand_in(weight, size, stride, *conv)
    only_data = [True, False, False]
    found: Tensor = torch.ops.aten.convolution_backward(
        gradient, stand_in, weight, None, *conv.as_op, only_data
    )[0]
    return found


def _stand_in(
    weight: Tensor,
    size: _Geometry,
    stride: _Geometry,
    steps: _Geometry,
    padding: _Geometry,
    dilation: _Geometry,
    groups: int,
) -> Tensor:
    """A tensor like the input of a convolution: without bytes, where its backend allows it."""
    conv = Convolution(steps, padding, dilation, groups).as_op
    bare = _bodiless(torch.empty_strided(size, stride, dtype=weight.dtype, device=weight.device))
    with torch.enable_grad():
        # A backend is chosen for what will go backward.
        backend = torch._C._select_conv_backend(bare.requires_grad_(), weight, None, *conv)
    bare = bare.detach()
    if backend not in _UNREAD:
        return torch.empty_strided(size, stride, dtype=weight.dtype, device=weight.device)
    memory_format = torch._C._conv_determine_backend_memory_format(bare, weight, backend)
    if bare.is_contiguous(memory_format=memory_format):
        return bare
    # The input would have been brought into this format first.
    return _bodiless(weight.new_empty(()).expand(size).contiguous(memory_format=memory_format))


def _bodiless(tensor: Tensor) -> Tensor:
    # Only a tensor that had bytes may have strides; an expanded one would be copied in full.
    tensor.untyped_storage().resize_(0)
    return tensor


def _without_bytes(
    weight: Tensor, size: _Geometry, stride: _Geometry, *conv: _Geometry | int
) -> Tensor:
    return _bodiless(torch.empty_strided(size, stride, dtype=weight.dtype, device=weight.device))


torch.library.define(
    "belady::stand_in",
    "(Tensor weight, SymInt[] size, SymInt[] stride, SymInt[] steps, SymInt[] padding, "
    "SymInt[] dilation, SymInt groups) -> Tensor",
)
torch.library.impl("belady::stand_in", "default", _stand_in)
torch.library.register_fake("belady::stand_in", _without_bytes)
