"""Which dimension of every operand carries the batch, found by tracing one sample more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from belady.errors import TraceError
from belady.ir.ops import FOLDED, SPREAD, Op, Phase
from belady.ir.trace import Trace
from belady.measure.clock import NoClock
from belady.measure.layouts import Issued, Laid, LayoutRecorder
from belady.measure.static import record, static_document

# A tensor as traced, and with one sample more.
Pair = tuple[Laid, Laid]


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
    recorder, larger = (LayoutRecorder(device, NoClock()) for _ in range(2))
    record(module, call, recorder)
    trace = static_document(module, recorder)
    tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.shape[:1] for tensor in tensors}
    if len(sizes) != 1 or sizes == {torch.Size()}:
        return trace
    try:
        record(module, call, larger, more_samples=1)
    except TraceError:
        return trace
    if [op.name for op in larger.ops] != [op.name for op in recorder.ops]:
        return trace
    ((samples,),) = sizes
    return with_batch_dims(trace, recorder.issued, larger.issued, samples)


def with_batch_dims(
    trace: Trace, issued: Sequence[Issued], larger: Sequence[Issued], samples: int
) -> Trace:
    """Name the batch dimension of every operand of ``trace``.

    Parameters
    ----------
    issued, larger
        Op by op: as traced, and with one sample more.
    samples
        As traced.

    Returns
    -------
    Trace
        With ``Op.batch_dims``: the dimension that has and grew by a row a sample, `FOLDED` where
        the first does by several, None where nothing grew (a parameter). `SPREAD` where it grew
        otherwise, where its rows are not in the order of the samples, where the op acts along them,
        and in forward where a number that the op is given comes from the batch's size.
    """
    places = _Places(samples)
    ops = (
        replace(op, batch_dims=_by_value(calls[0].operands, _dims(op, places, *calls)))
        for op, *calls in zip(trace.ops, issued, larger, strict=True)
    )
    return replace(trace, ops=tuple(ops))


def _by_value(operands: Sequence[Laid], dims: Sequence[int | None]) -> tuple[int | None, ...]:
    """One dimension for each value that an op reads, if it reads each in one way."""
    if len(operands) != len(dims):
        return tuple(dims)
    found = dict.fromkeys(
        (it.storage, dim)
        for it, dim in zip(operands, dims, strict=True)
        if it.storage >= 0 or dim is not None
    )
    once = len(dict(found)) == len(found)
    return tuple(dim for _, dim in found) if once else tuple(dims)


def _dims(op: Op, places: _Places, one: Issued, other: Issued) -> list[int | None]:
    operands = list(zip(one.operands, other.operands, strict=True))
    results = list(zip(one.results, other.results, strict=True))
    dims = [places.dim(pair) for pair in operands]
    fresh = [pair for pair in results if places.is_new(pair)]
    for pair in fresh:
        places.born(pair)
    if op.phase is Phase.BACKWARD:
        return dims
    if (fresh or op.mutates) and one.numbers != other.numbers:
        # Slices would be called with the numbers of slices.
        return [SPREAD] * max(len(dims), 1)
    if op.name.startswith("aten.embedding."):
        # A table of which any row may be taken.
        dims[0] = None if dims[0] is None else SPREAD
    if one.along is not None:
        along = {one.along} | ({FOLDED} if not one.along else set())
        dims = [SPREAD if dim in along else dim for dim in dims]
    return dims


class _Rows(NamedTuple):
    """The sample at a byte of a storage: ``byte // size % samples``."""

    size: int
    samples: int


class _Places:
    """Where the samples lie in each storage, as it was first written.

    However a tensor was viewed since, its strides show whether an index of one of its dimensions is
    a sample: a view with the same sizes can have them in another order.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._rows: dict[int, tuple[_Rows, _Rows] | None] = {}

    def is_new(self, pair: Pair) -> bool:
        """Whether the storage of a result has not been seen."""
        return pair[0].storage not in self._rows

    def born(self, pair: Pair) -> None:
        """Take a storage to lie as the growth of the first tensor on it says."""
        if pair[0].storage < 0:
            return
        dim = _grown(pair[0].shape, pair[1].shape, self._samples)
        self._rows[pair[0].storage] = None
        if dim is None or dim == SPREAD:
            return
        at, each = max(dim, 0), self._rows_each(pair)
        one, other = (
            _Rows(each * it.stride[at], samples)
            for it, samples in zip(pair, (self._samples, self._samples + 1), strict=True)
        )
        if _in_order(pair[0], at, each, one) and _in_order(pair[1], at, each, other):
            self._rows[pair[0].storage] = one, other

    def dim(self, pair: Pair) -> int | None:
        """The dimension of an operand that carries the batch, as in `Op.batch_dims`."""
        found = _grown(pair[0].shape, pair[1].shape, self._samples)
        if pair[0].storage < 0:
            return None if found is None else SPREAD
        if self.is_new(pair):
            self.born(pair)
        if found is None or found == SPREAD:
            return found
        rows, at = self._rows[pair[0].storage], max(found, 0)
        if rows is None:
            # The same for all samples: expanded.
            return found if not any(it.stride[at] for it in pair) else SPREAD
        each = self._rows_each(pair)
        in_order = all(_in_order(it, at, each, its) for it, its in zip(pair, rows, strict=True))
        return found if in_order else SPREAD

    def _rows_each(self, pair: Pair) -> int:
        """Rows a sample of the dimension that grew."""
        (grown,) = (b - a for a, b in zip(pair[0].shape, pair[1].shape, strict=True) if a != b)
        return grown


def _in_order(laid: Laid, dim: int, each: int, rows: _Rows) -> bool:
    """Whether rows of ``dim`` lie within their samples, so many of ``each`` one after another."""
    period = rows.size * rows.samples
    own = laid.stride[dim]
    if not period or each * own != rows.size or laid.shape[dim] != each * rows.samples:
        return False
    reach = laid.offset % period + (each - 1) * own
    for at, (count, stride) in enumerate(zip(laid.shape, laid.stride, strict=True)):
        if at != dim and stride % period:
            reach += (count - 1) * stride
    return reach < rows.size


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
