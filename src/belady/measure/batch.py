"""Which dimension of every operand carries the batch, found by tracing one sample more.

Or the tokens of each sample, found by tracing one token less: more may be over what a model allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from belady.errors import TraceError
from belady.ir.ops import FOLDED, SPREAD, Op, Phase
from belady.ir.trace import Trace
from belady.measure.clock import NoClock
from belady.measure.layouts import Issued, Laid, LayoutRecorder
from belady.measure.resized import Resized, fewer_tokens, more_samples
from belady.measure.static import record, static_document

# A tensor as traced, and with other samples.
Pair = tuple[Laid, Laid]


def static_trace_with_batch(
    module: torch.nn.Module, call: tuple[Any, Any], device: torch.device, along: int = 0
) -> Trace:
    """Like `belady.measure.static.static_trace`, with ``Op.batch_dims`` where they can be known.

    The batch is the first dimension of every tensor in the call. Where these differ, or one
    sample more cannot be traced or runs other ops, nothing is known.

    Parameters
    ----------
    along
        1 for the tokens in the place of the batch: the second dimension of the first tensor that
        has two, and what is as long in others. There are more than two.

    Raises
    ------
    TraceError
        If the call itself cannot be faked.
    """
    recorder, other = (LayoutRecorder(device, NoClock()) for _ in range(2))
    record(module, call, recorder)
    trace = static_document(module, recorder)
    resized = fewer_tokens(call) if along else more_samples(call)
    if resized is None:
        return trace
    try:
        record(module, call, other, resized)
    except TraceError:
        return trace
    if [op.name for op in other.ops] != [op.name for op in recorder.ops]:
        return trace
    return with_batch_dims(trace, recorder.issued, other.issued, resized)


def with_batch_dims(
    trace: Trace, issued: Sequence[Issued], other: Sequence[Issued], resized: Resized
) -> Trace:
    """Name the batch dimension of every operand of ``trace``.

    Parameters
    ----------
    issued, other
        Op by op: as traced, and resized.
    resized
        With one sample more, or one token less.

    Returns
    -------
    Trace
        With ``Op.batch_dims``: the dimension that has and changed by a row a sample, `FOLDED` where
        the first does by several, None where nothing changed (a parameter). `SPREAD` where it
        changed otherwise, where its rows are not in the order of the samples, where the op acts
        along them, and in forward where a number that the op is given comes from how many there
        are.
    """
    places = _Places(resized)
    ops = (
        replace(op, batch_dims=_by_value(calls[0].operands, _dims(op, places, *calls)))
        for op, *calls in zip(trace.ops, issued, other, strict=True)
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
    runs = {places.runs(pair) for pair in operands} - {0}
    for pair in fresh:
        places.born(pair, max(runs, default=1))
    if op.phase is Phase.BACKWARD:
        return dims
    if len(runs) > 1:
        # Row by row they would meet rows of others.
        return [SPREAD] * len(dims)
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

    def __init__(self, resized: Resized) -> None:
        self._counts = resized.counts
        self._comes_again = resized.comes_again
        self._rows: dict[int, tuple[_Rows, _Rows] | None] = {}

    def is_new(self, pair: Pair) -> bool:
        """Whether the storage of a result has not been seen."""
        return pair[0].storage not in self._rows

    def born(self, pair: Pair, runs: int = 1) -> None:
        """Take a storage to lie as the change of the first tensor on it says.

        Parameters
        ----------
        runs
            How often all samples come one after another in a first dimension with several rows of
            each: as in what it was made from, since ops keep rows in their order.
        """
        if pair[0].storage < 0:
            return
        dim = _changed(pair, self._counts)
        self._rows[pair[0].storage] = None
        if dim is None or dim == SPREAD:
            return
        at, each, runs = max(dim, 0), self._rows_each(pair), runs if dim == FOLDED else 1
        if each % runs:
            return
        one, other = (
            _Rows(each // runs * it.stride[at], count)
            for it, count in zip(pair, self._counts, strict=True)
        )
        if self._in_order(pair, each, (one, other)):
            self._rows[pair[0].storage] = one, other

    def runs(self, pair: Pair) -> int:
        """How often all samples come in a first dimension with several rows of each, 0 if in any.

        All of them come one after another, then all of them again.
        """
        if pair[0].storage < 0 or self.dim(pair) != FOLDED:
            return 0
        rows = self._rows[pair[0].storage]
        return 0 if rows is None else self._rows_each(pair) * pair[0].stride[0] // rows[0].size

    def dim(self, pair: Pair) -> int | None:
        """The dimension of an operand that carries the batch, as in `Op.batch_dims`."""
        found = _changed(pair, self._counts)
        if pair[0].storage < 0:
            return None if found is None else SPREAD
        if self.is_new(pair):
            self.born(pair)
        if found is None or found == SPREAD:
            return found
        rows = self._rows[pair[0].storage]
        if rows is None:
            # The same for all samples: expanded.
            return found if not any(it.stride[max(found, 0)] for it in pair) else SPREAD
        return found if self._in_order(pair, self._rows_each(pair), rows) else SPREAD

    def _in_order(self, pair: Pair, each: int, rows: tuple[_Rows, _Rows]) -> bool:
        """Whether tensors with so many rows a sample have them within their samples, in order."""
        at = max(_changed(pair, self._counts) or 0, 0)
        both = zip(pair, rows, strict=True)
        runs = {_runs(laid, at, each, its) for laid, its in both}
        return len(runs) == 1 and (runs == {1} or (self._comes_again and 0 not in runs))

    def _rows_each(self, pair: Pair) -> int:
        """Rows a sample of the dimension that changed."""
        sizes = zip(pair[0].shape, pair[1].shape, strict=True)
        (changed,) = (b - a for a, b in sizes if a != b)
        return changed // (self._counts[1] - self._counts[0])


def _runs(laid: Laid, dim: int, each: int, rows: _Rows) -> int:
    """How often all samples come, in their order, in rows of ``dim``; 0 if rows lie otherwise.

    Of ``each`` rows a sample, as many as it has one after another each time.
    """
    period = rows.size * rows.samples
    own = laid.stride[dim]
    if not own or not period or rows.size % own or laid.shape[dim] != each * rows.samples:
        return 0
    together = rows.size // own
    if each % together:
        return 0
    reach = laid.offset % period + (together - 1) * own
    for at, (count, stride) in enumerate(zip(laid.shape, laid.stride, strict=True)):
        if at != dim and stride % period:
            reach += (count - 1) * stride
    return each // together if reach < rows.size else 0


def _changed(pair: Pair, counts: tuple[int, int]) -> int | None:
    before, after = pair[0].shape, pair[1].shape
    if before == after:
        return None
    if len(before) != len(after):
        return SPREAD
    (samples, others), changed = counts, [at for at, it in enumerate(before) if after[at] != it]
    rows = (after[changed[0]] - before[changed[0]]) // (others - samples)
    if len(changed) > 1 or (before[changed[0]], after[changed[0]]) != (
        rows * samples,
        rows * others,
    ):
        return SPREAD
    return changed[0] if rows == 1 else SPREAD if changed[0] else FOLDED
