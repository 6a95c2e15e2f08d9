"""What the tensors that a stretch saves show of the rows that are cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from math import prod

from belady.ir.ops import FOLDED
from belady.ir.trace import Save, Trace
from belady.ir.undivided import batch_dim


def showing(
    trace: Trace,
    forward: AbstractSet[int],
    norms: AbstractSet[int],
    values: Iterable[int],
    full: AbstractSet[int],
) -> list[Save]:
    """What ``forward`` saves of ``values`` of which one dimension has a row a sample.

    Parameters
    ----------
    norms
        Batch norms, which save what has none.
    full
        Storages that every slice makes in full.
    """
    born = {trace.values[value].storage for value in values}
    # Without bytes is what a batch norm of stated statistics saves.
    moving = {i for i, it in enumerate(trace.storages) if it.nbytes and not it.persistent}
    found = born & moving - full
    return [
        save
        for value in trace.values
        if value.storage in found
        for save in value.saves
        if save.op in forward and (save.as_input or save.op not in norms) and save.shape
        if FOLDED not in trace.ops[save.op].batch_dims
    ]


def rows_of(trace: Trace, saves: Sequence[Save]) -> list[int]:
    """Numbers of rows that ``saves`` have, ascending: one, if all is well."""
    return sorted({save.shape[batch_dim(trace.ops[save.op], save)] for save in saves})


def lie_apart(trace: Trace, saves: Sequence[Save], along: int) -> bool:
    """Whether rows of a slice along a dimension lie apart in the whole: of each sample some."""
    dims = [batch_dim(trace.ops[save.op], save) for save in saves]
    pairs = zip(saves, dims, strict=True)
    apart = [prod(save.shape[:dim]) > 1 for save, dim in pairs if dim == along]
    return bool(apart) and all(apart)
