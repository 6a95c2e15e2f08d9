"""Sums of gradients as autograd makes them where nothing watches: in place.

Where a value has several readers, autograd adds up their gradients, into the first one if it is the
only holder (PyTorch, torch/csrc/autograd/input_buffer.cpp). Under a dispatch mode it never is, so a
trace has a tensor more than other iterations have: three gradients at once at every fork of a
residual network.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch.autograd.function import BackwardCFunction

from belady.ir.trace import Storage, StorageKind, Trace, Value

_ADD = "aten.add.Tensor"
_IN_PLACE = "aten.add_.Tensor"


def may_sum(name: str, node: Any) -> bool:
    """Whether an op of backward, run while ``node`` is autograd's, can be such a sum.

    A function of the user's adds up as it says.
    """
    return name == _ADD and not isinstance(node, BackwardCFunction)


def in_place(trace: Trace, candidates: Iterable[int]) -> Trace:
    """The trace with sums of gradients in the place of the first, where that one ends with them.

    Parameters
    ----------
    candidates
        Ops of which `may_sum` was true.
    """
    joining = _Joining(trace)
    for at in candidates:
        if joining.ends_a_node(at):
            joining.join(at)
    return joining.trace()


class _Joining:
    """A trace whose storages become one another."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._ops = list(trace.ops)
        self._values = list(trace.values)
        self._storages: dict[int, Storage] = dict(enumerate(trace.storages))
        self._of: dict[int, list[int]] = {}
        for index, value in enumerate(trace.values):
            self._of.setdefault(value.storage, []).append(index)

    def ends_a_node(self, at: int) -> bool:
        """Whether op ``at`` adds what its node has just made to what another made, which ends."""
        op = self._ops[at]
        if len(op.reads) != 2 or len(op.writes) != 1 or op.mutates:
            return False
        first, second, made = (self._values[value] for value in (*op.reads, *op.writes))
        into, gone = (self._storages[it.storage] for it in (first, made))
        return (
            self._node_of(first) != op.forward_op == self._node_of(second)
            and into.kind is gone.kind is StorageKind.ACTIVATION
            and into.death == at + 1
            and into.nbytes == gone.nbytes
            and made.version == 0
            and not any(self._values[it].saves for it in self._of[first.storage])
        )

    def join(self, at: int) -> None:
        """Let op ``at`` write its first operand."""
        op = self._ops[at]
        into, gone = (self._values[it].storage for it in (op.reads[0], op.writes[0]))
        newest = max(self._values[it].version for it in self._of[into])
        for index in self._of.pop(gone):
            value = self._values[index]
            version = newest + 1 + value.version
            self._values[index] = replace(value, storage=into, version=version)
            self._of[into].append(index)
        after = self._storages.pop(gone)
        self._storages[into] = replace(
            self._storages[into], released=after.released, death=after.death
        )
        self._ops[at] = replace(op, name=_IN_PLACE, mutates=True)

    def trace(self) -> Trace:
        """The trace as it is now."""
        number = {storage: index for index, storage in enumerate(self._storages)}
        return replace(
            self._trace,
            ops=tuple(self._ops),
            storages=tuple(self._storages.values()),
            values=tuple(replace(it, storage=number[it.storage]) for it in self._values),
        )

    def _node_of(self, value: Value) -> int | None:
        return self._ops[value.producer].forward_op if value.producer >= 0 else None
