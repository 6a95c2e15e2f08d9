"""One call of a layer, as three nodes of autograd's graph.

::

    input ──┬─ detached ─→ the layer's own node (parameters) ─┬─→ junction ─→ output
            └────────────→ node of the data gradient ─────────┘

Backward starts at the junction, which hands the gradient to both. Of the nodes that are ready,
autograd's engine runs the one made last; so the layer's own node comes first, is the only one that
has saved the input, and lets go of it when it is done. The node of the data gradient has saved the
weight alone. Before it makes the gradient, the ReLU that gave the input lets go of it too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from belady.errors import OrderError
from belady.ordered import relu
from belady.ordered.limits import is_plain, may_differ
from belady.ordered.standin import Convolution, data_gradient

_CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
LAYERS = frozenset({nn.ReLU, nn.Linear, *_CONVOLUTIONS})


def fits(layer: Any, x: Any) -> bool:
    """Whether this call gains from the order and is known to give the same bits in it."""
    if not may_differ(layer, x):
        return False
    if isinstance(layer, nn.ReLU):
        return relu.fits(layer, x)
    # What the caller holds cannot be let go of.
    if x.is_leaf or not layer.weight.requires_grad:
        return False
    parameters = [it for it in (layer.weight, layer.bias) if it is not None]
    if not all(is_plain(it) and _alike(it, x) for it in (x, *parameters)):
        return False
    return _linear_fits(x) if isinstance(layer, nn.Linear) else _convolution_fits(layer, x)


def call(layer: Any, x: Tensor) -> Tensor:
    """Run a call that `fits`."""
    if isinstance(layer, nn.ReLU):
        return relu.call(layer, x)
    return _linear(layer, x) if isinstance(layer, nn.Linear) else _convolution(layer, x)


def _alike(tensor: Tensor, x: Tensor) -> bool:
    """Whether the layer's op would take ``tensor`` together with ``x``."""
    if tensor.device != x.device:
        return False
    if torch.is_autocast_enabled(x.device.type):
        return tensor.dtype is not torch.float64
    return tensor.dtype is x.dtype


def _cast(x: Tensor) -> Tensor:
    """What autocast makes of an input; torch makes its cast of a weight once for several calls."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


# -- convolutions ---------------------------------------------------------------------------------


def _convolution_fits(layer: Any, x: Tensor) -> bool:
    if x.dim() != len(layer.kernel_size) + 2 or x.shape[1] != layer.in_channels:
        return False
    padding = _padding(layer)
    return padding is not None and min(_output_shape(layer, x, padding)) > 0


def _padding(layer: Any) -> tuple[int, ...] | None:
    """Zeros on both sides of each dimension; None where the sides differ."""
    if layer.padding_mode != "zeros":
        return (0,) * len(layer.kernel_size)
    sides = layer._reversed_padding_repeated_twice
    left, right = tuple(sides[::2])[::-1], tuple(sides[1::2])[::-1]
    return left if left == right else None


def _output_shape(layer: Any, x: Tensor, padding: tuple[int, ...]) -> tuple[int, ...]:
    sizes = zip(x.shape[2:], padding, layer.dilation, layer.kernel_size, layer.stride, strict=True)
    return (
        x.shape[0],
        layer.out_channels,
        *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sizes),
    )


def _convolution(layer: Any, x: Tensor) -> Tensor:
    padding = _padding(layer)
    assert padding is not None
    if layer.padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
    x = _cast(x)
    conv = Convolution(layer.stride, padding, layer.dilation, layer.groups)
    # First, so that its node is the older one.
    token = _begin(_ConvolutionInput, x, layer.weight, _output_shape(layer, x, padding), conv)
    op = _CONVOLUTIONS[type(layer)]
    return _join(op(x.detach(), layer.weight, layer.bias, *conv), token)


class _ConvolutionInput(torch.autograd.Function):
    """Begins the graph of a convolution's data gradient; the token has the output's shape."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, shape: tuple[int, ...], conv: Convolution
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.conv, ctx.geometry = conv, (x.shape, x.stride(), x.dtype)
        ctx.relu = relu.read(x)
        return torch.empty((), dtype=x.dtype, device=x.device).expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        _let_go(ctx)
        size, stride, dtype = ctx.geometry
        found = data_gradient(gradient, size, stride, weight.to(dtype), ctx.conv)
        return found, None, None, None


# -- linear layers --------------------------------------------------------------------------------


def _linear_fits(x: Tensor) -> bool:
    # A transposed input is multiplied in another order, which can change a bit.
    return x.dim() >= 2 and x.is_contiguous() and x.shape[-1] > 1


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    x = _cast(x)
    token = _begin(_LinearInput, x, layer.weight, (*x.shape[:-1], layer.out_features))
    return _join(F.linear(x.detach(), layer.weight, layer.bias), token)


class _LinearInput(torch.autograd.Function):
    """Begins the graph of a linear layer's data gradient; the token has the output's shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.relu = relu.read(x)
        return torch.empty((), dtype=x.dtype, device=x.device).expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        _let_go(ctx)
        rows = gradient.reshape(-1, gradient.shape[-1])
        return rows.mm(weight.to(ctx.dtype)).view(ctx.shape), None, None


def _let_go(ctx: Any) -> None:
    """The layer's own node has let go of its input: so does the ReLU whose result it is."""
    if ctx.relu is not None:
        relu.read_no_more(ctx.relu)


# -- the junction ---------------------------------------------------------------------------------


def _begin(node: type[torch.autograd.Function], *args: Any) -> Tensor:
    token: Tensor = node.apply(*args)  # type: ignore[no-untyped-call]
    return token


def _join(output: Tensor, token: Tensor) -> Tensor:
    joined: Tensor = _Junction.apply(output, token)  # type: ignore[no-untyped-call]
    return joined


class _Junction(torch.autograd.Function):
    """Gives the layer's output, and in backward its gradient to both nodes."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor) -> Tensor:
        # Detached, it is no view in autograd's eyes: what comes next may write into it.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise OrderError(
                "a layer goes backward in belady's coordinated order, where its input is gone "
                "before the last gradient, so this gradient has no graph of its own: "
                "create_graph=True (a gradient of a gradient) works with another policy"
            )
        return gradient, gradient
