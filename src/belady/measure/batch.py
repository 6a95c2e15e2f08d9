"""Which dimension of every operand carries the batch, found by tracing one sample more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from belady.errors import TraceError
from belady.ir.ops import FOLDED, SPREAD
from belady.ir.trace import Trace
from belady.measure.static import record, static_document

# Shapes of the tensor operands of every op.
Shapes = Sequence[Sequence[tuple[int, ...]]]


def static_trace_with_batch(
    module: torch.nn.Module, call: tuple[Any, Any], device: torch.device
) -> Trace:
    """Like `belady.measure.static.static_trace`, with ``Op.batch_dims`` where they can be known.

    The batch is the first dimension of every tensor in the call. Where these differ, or one
    sample more cannot be traced or runs other ops, nothing is known.

    Raises
    ------
    TraceError
        If the call itself cannot be faked.
    """
    recorder = record(module, call, device)
    trace = static_document(module, recorder)
    tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.shape[:1] for tensor in tensors}
    if len(sizes) != 1 or sizes == {torch.Size()}:
        return trace
    try:
        larger = record(module, call, device, more_samples=1)
    except TraceError:
        return trace
    if [op.name for op in larger.ops] != [op.name for op in recorder.ops]:
        return trace
    ((samples,),) = sizes
    return with_batch_dims(trace, recorder.shapes, larger.shapes, samples)


def with_batch_dims(trace: Trace, shapes: Shapes, larger: Shapes, samples: int) -> Trace:
    """Name the batch dimension of every operand of ``trace``.

    Parameters
    ----------
    shapes, larger
        Operand shapes op by op: as traced, and with one sample more.
    samples
        As traced.

    Returns
    -------
    Trace
        With ``Op.batch_dims``: the dimension that has and grew by a row a sample, `FOLDED` where
        the first does by several, `SPREAD` where it grew otherwise, or None where it did not (a
        parameter).
    """
    ops = (
        replace(
            op,
            batch_dims=tuple(_grown(*pair, samples) for pair in zip(before, after, strict=True)),
        )
        for op, before, after in zip(trace.ops, shapes, larger, strict=True)
    )
    return replace(trace, ops=tuple(ops))


def _grown(before: tuple[int, ...], after: tuple[int, ...], samples: int) -> int | None:
    if before == after:
        return None
    if len(before) != len(after):
        return SPREAD
    changed = [dim for dim, size in enumerate(before) if after[dim] != size]
    rows = after[changed[0]] - before[changed[0]]
    if len(changed) > 1 or before[changed[0]] != rows * samples:
        return SPREAD
    return changed[0] if rows == 1 else SPREAD if changed[0] else FOLDED
