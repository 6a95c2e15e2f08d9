"""Random numbers of a stretch: drawn once, for all its slices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from belady.ir.ops import Op
from belady.ir.slicing import WHOLE, Draft, Rewriting
from belady.ir.trace import StorageKind, Trace

# A dropout that writes factors, and one that writes its result and a mask.
_FACTORS = "aten.bernoulli_."
_MASK = "aten.native_dropout."


def draws_factors_or_mask(op: Op) -> bool:
    """Whether an op draws as a dropout does, whose random numbers all slices can share."""
    return op.random and op.name.startswith((_FACTORS, _MASK))


def find_draws(trace: Trace, ops: Sequence[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Those of ``ops`` that draw for all slices, and the storages of what they draw.

    With an op that writes factors go those that write nothing but these.
    """
    drawn = set()
    for at in ops:
        op = trace.ops[at]
        if draws_factors_or_mask(op):
            # A mask comes after the result.
            drawn.add(trace.values[op.writes[-1]].storage)
    found = {
        at
        for at in ops
        if draws_factors_or_mask(trace.ops[at])
        or (
            trace.ops[at].writes
            and all(trace.values[value].storage in drawn for value in trace.ops[at].writes)
        )
    }
    return frozenset(found), frozenset(drawn)


class Drawing:
    """Writes what one stretch draws.

    Parameters
    ----------
    ops, storages
        As `find_draws` gives them.
    parts
        Numbers of the slices.
    """

    def __init__(
        self, writing: Rewriting, ops: Collection[int], storages: Collection[int], parts: range
    ) -> None:
        self._writing = writing
        self._old = writing.trace
        self._ops = ops
        self._storages = storages
        self._parts = parts

    def issues(self, at: int, part: int, nbytes: int) -> bool:
        """Issue op ``at`` for a slice if it draws; ``nbytes``: of the slice of a result."""
        if at not in self._ops:
            return False
        op = self._old.ops[at]
        if part == self._parts[0]:
            if op.name.startswith(_MASK):
                self._draw_mask(at)
            elif op.mutates:
                self._writing.copy(at)
            else:
                self._born("empty_strided.default", at, op.writes[0])
        if op.name.startswith(_MASK):
            self._masked(at, part, nbytes)
        return True

    def cut(self, at: int) -> None:
        """Before op ``at``: cut a slice of the factors that it reads."""
        op = self._old.ops[at]
        for value in op.reads if op.forward_op is None else ():
            if self._old.values[value].storage in self._storages:
                self._writing.extra("slice.Tensor", op, [self._writing.value(value, WHOLE)])

    def used(self, at: int, part: int) -> None:
        """Op ``at`` is issued for a slice; after the last one, forward lets go of what it reads."""
        op = self._old.ops[at]
        if part != self._parts[-1] or op.forward_op is not None:
            return
        for value in (*op.reads, *op.writes):
            if self._old.values[value].storage in self._storages:
                draft = self._writing.draft(self._writing.value(value, WHOLE))
                draft.released = len(self._writing.ops)

    def _draw_mask(self, at: int) -> None:
        writing, op = self._writing, self._old.ops[at]
        result, mask = op.writes
        scratch = self._born("empty_strided.default", at, result)
        other = self._born(op.name.removeprefix("aten."), at, result, [scratch])
        index = len(writing.ops) - 1
        writing.ops[index] = replace(
            op, reads=(scratch,), writes=writing.ops[index].writes, forward_op=None
        )
        writing.name(mask, WHOLE, writing.born(self._draft(mask)))
        for value in (scratch, other):
            writing.draft(value).released = index + 1

    def _masked(self, at: int, part: int, nbytes: int) -> None:
        writing, op = self._writing, self._old.ops[at]
        result, mask = op.writes
        whole = writing.value(mask, WHOLE)
        writing.extra("slice.Tensor", op, [whole])
        given = [writing.value(value, part) for value in op.reads]
        index = writing.extra("native_dropout_backward.default", op, [*given, whole])
        draft = replace(self._draft(result), nbytes=nbytes, part=part)
        writing.name(result, part, writing.born(draft))
        writing.places[at, part] = index
        self.used(at, part)

    def _born(self, name: str, at: int, old: int, reads: Sequence[int] = ()) -> int:
        """Issue an op that makes a storage of the size of an old value's; gives its value."""
        writing = self._writing
        index = writing.extra(name, self._old.ops[at], reads)
        new = writing.born(self._draft(old))
        if self._old.values[old].storage in self._storages:
            writing.name(old, WHOLE, new)
            writing.places[at, WHOLE] = index
        return new

    def _draft(self, old: int) -> Draft:
        storage = self._old.values[old].storage
        like = self._old.storages[storage]
        birth = len(self._writing.ops) - 1
        return Draft(like.nbytes, like.device, StorageKind.ACTIVATION, birth, storage)
