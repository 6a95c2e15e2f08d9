"""A ReLU that lets go of its output before the gradient of its input is made.

Its gradient asks of the output whether it is positive, no more. The layer that reads the output
holds it until its own backward in any case, so nothing is gained by a copy of the signs before:
they are taken when that layer lets go of the output, or else when the ReLU goes backward. From then
on a byte an element is held, and the next gradient takes the output's place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_DENSE = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_PARTS, _LEAST = 32, 1 << 12


def fits(layer: nn.ReLU, x: Tensor) -> bool:
    """Whether a call that may differ gives the same bits, or the same error."""
    return not layer.inplace or (not (x.is_leaf or x._is_view()) and is_dense(x))


def call(layer: nn.ReLU, x: Tensor) -> Tensor:
    """Run a call that `fits`."""
    result: Tensor = _Relu.apply(x, layer.inplace)  # type: ignore[no-untyped-call]
    return result


def source_of(x: Tensor) -> Any:
    """The node of the ReLU whose result ``x`` is; None if it is not one's."""
    node = x.grad_fn
    return node if type(node) is _Relu._backward_cls else None


def read(x: Tensor) -> Any:
    """`source_of` for a layer that saves ``x``, and will say `read_no_more` in backward."""
    node = source_of(x)
    if node is not None:
        node.readers += 1
    return node


def read_no_more(node: Any) -> None:
    """A layer has let go of what it `read`; so does the ReLU, if no other layer holds it."""
    if _may_let_go():
        node.readers -= 1
        if not node.readers:
            _let_go(node)


def _let_go(node: Any) -> None:
    """Keep the signs alone."""
    if node.positive is not None:
        return
    (output,) = node.saved_tensors
    # Never below zero; NaN lets a gradient pass, as in plain PyTorch.
    node.positive = output.bool()
    node.maybe_clear_saved_tensors()


class _Relu(torch.autograd.Function):
    """One node; ``positive`` are the signs, once it has let go of the output.

    ``readers`` is how many layers in order hold the output and have not gone backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_place: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.positive, ctx.readers = None, 0
        if in_place:
            ctx.mark_dirty(x)
        output = x.relu_() if in_place else x.relu()
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None
        if _may_let_go():
            _let_go(ctx)
        positive = ctx.positive
        if positive is None:
            # Saved as the output of this node: a gradient of this gradient is plain PyTorch's.
            (output,) = ctx.saved_tensors
            return _passed(gradient, output), None
        if not _is_kept():
            ctx.positive = None
        # What goes by parts has no gradient of its own.
        if goes_by_parts(gradient, positive) and not torch.is_grad_enabled():
            return torch.ops.belady.passed_by_sign(gradient, positive), None
        return _passed(gradient, positive), None


def _may_let_go() -> bool:
    """Whether nobody asks for the output once more: no second backward, no gradient's gradient."""
    return not torch.is_grad_enabled() and not _is_kept()


def _is_kept() -> bool:
    """Whether the graph that goes backward may do so again (``retain_graph=True``)."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


def is_dense(x: Tensor) -> bool:
    """Whether it lies dense in one of torch's formats."""
    # Signs lie dense, and a gradient is laid out after what it is compared with.
    return any(x.is_contiguous(memory_format=it) for it in _DENSE)


def _passed(gradient: Tensor, output: Tensor) -> Tensor:
    """What plain PyTorch does, given an output or its signs."""
    found: Tensor = torch.ops.aten.threshold_backward(gradient, output, 0)
    return found


def goes_by_parts(gradient: Tensor, positive: Tensor) -> bool:
    """Whether a gradient passes by signs part by part: a CPU would make floats of all at once."""
    return gradient.device.type == "cpu" and gradient.stride() == positive.stride()


def _passed_by_sign(gradient: Tensor, positive: Tensor) -> Tensor:
    """The same part by part, where both are dense and lie alike."""
    found = torch.empty_like(gradient)
    count = gradient.numel()
    given, signs, made = (it.as_strided((count,), (1,)) for it in (gradient, positive, found))
    step = max(count // _PARTS, _LEAST)
    for at in (slice(start, start + step) for start in range(0, count, step)):
        torch.ops.aten.threshold_backward.grad_input(given[at], signs[at], 0, grad_input=made[at])
    return found


# One op, so that whoever counts bytes op by op sees one.
torch.library.define("belady::passed_by_sign", "(Tensor gradient, Tensor positive) -> Tensor")
torch.library.impl("belady::passed_by_sign", "default", _passed_by_sign)
torch.library.register_fake("belady::passed_by_sign", _passed)
