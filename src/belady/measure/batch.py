"""Which dimension of every operand carries the batch, found by tracing one sample more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from belady.errors import TraceError
from belady.ir.trace import Trace
from belady.measure.static import operand_shapes

# Shapes of the tensor operands of every op.
Shapes = Sequence[Sequence[tuple[int, ...]]]


def batch_shapes(
    module: torch.nn.Module, call: tuple[Any, Any], device: torch.device
) -> tuple[Shapes, Shapes] | None:
    """Operand shapes of a static trace of the call, and of one with a batch larger by one.

    Parameters
    ----------
    call
        ``(args, kwargs)``; the batch is the first dimension of every tensor in it.

    Returns
    -------
    tuple or None
        None where the tensors have no such dimension in common, or the larger call fails.
    """
    tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.shape[:1] for tensor in tensors}
    if len(sizes) != 1 or sizes == {torch.Size()}:
        return None
    try:
        return (
            operand_shapes(module, call, device),
            operand_shapes(module, tree_map_only(torch.Tensor, _one_more, call), device),
        )
    except TraceError:
        return None


def with_batch_dims(trace: Trace, shapes: Shapes, larger: Shapes) -> Trace:
    """Name the batch dimension of every operand of ``trace``.

    Parameters
    ----------
    shapes, larger
        What `batch_shapes` gives for the call that was traced.

    Returns
    -------
    Trace
        With ``Op.batch_dims``: the dimension that grew by one, None where there is no single one
        (a parameter, a flattened batch). Unchanged where another batch runs other ops.
    """
    if not len(trace.ops) == len(shapes) == len(larger):
        return trace
    ops = []
    for op, before, after in zip(trace.ops, shapes, larger, strict=True):
        if len(before) != len(after):
            return trace
        dims = tuple(_grown(*pair) for pair in zip(before, after, strict=True))
        ops.append(replace(op, batch_dims=dims))
    return replace(trace, ops=tuple(ops))


def _grown(before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    if len(before) != len(after):
        return None
    changed = [dim for dim, (low, high) in enumerate(zip(before, after, strict=True)) if low != high]
    one = len(changed) == 1 and after[changed[0]] == before[changed[0]] + 1
    return changed[0] if one else None


def _one_more(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor with one sample more; only its geometry counts."""
    count, *rest = tensor.shape
    return tensor.detach()[:1].expand(count + 1, *rest).requires_grad_(tensor.requires_grad)
