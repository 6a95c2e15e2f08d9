"""What every slice of a stretch makes in full, and where the batch is in the rest."""

from __future__ import annotations

from collections.abc import Sequence

from belady.ir.ops import Op
from belady.ir.trace import Save, Trace

# Ops of a stretch: forward and backward.
Ops = tuple[Sequence[int], Sequence[int]]


def undivided(trace: Trace, ops: Ops, given: int, totals: frozenset[int]) -> frozenset[int]:
    """Storages of a stretch that no slice has a share of.

    That is what has no samples in it, and what gradients of parameters are made of; and those from
    before that all slices share.

    Parameters
    ----------
    given
        Value that goes into the stretch.
    totals
        Storages of gradients of parameters.
    """
    whole = totals | _without_samples(trace, {*ops[0], *ops[1]})
    for at in reversed(ops[1]):
        op = trace.ops[at]
        if "_to_copy" in op.name and whole.intersection(
            trace.values[value].storage for value in op.writes
        ):
            whole |= {trace.values[value].storage for value in op.reads}
    shared = {
        trace.values[value].storage
        for at in ops[0]
        for value in trace.ops[at].reads
        if trace.values[value].producer < ops[0][0] and value != given
    }
    return _made_without(trace, ops[0], given) | whole | shared


def _made_without(trace: Trace, forward: Sequence[int], given: int) -> frozenset[int]:
    """What forward makes of parameters alone, such as the weights that autocast casts."""
    dependent, found = {given}, set[int]()
    for at in forward:
        op = trace.ops[at]
        if dependent.intersection(op.reads):
            dependent.update(op.writes)
        else:
            found.update(trace.values[value].storage for value in op.writes)
    return frozenset(found)


def _without_samples(trace: Trace, own: set[int]) -> frozenset[int]:
    """What is made here and read as no part of the batch: seeds, sums over the samples."""
    reads = (
        (value, dim)
        for op in map(trace.ops.__getitem__, own)
        if len(op.reads) == len(op.batch_dims)
        for value, dim in zip(op.reads, op.batch_dims, strict=True)
    )
    return frozenset(
        trace.values[value].storage
        for value, dim in reads
        if dim is None and trace.values[value].producer in own
    )


def batch_dim(op: Op, save: Save) -> int:
    """The dimension of a tensor that ``op`` saves which carries the batch: as what it reads."""
    named = {dim for dim in op.batch_dims if dim is not None and dim >= 0}
    found = named.pop() if len(named) == 1 else 0
    return found if found < len(save.shape) else 0
