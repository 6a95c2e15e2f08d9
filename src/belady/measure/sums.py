"""Sums of gradients as autograd makes them where nothing watches: in place.

Where a value has several readers, autograd adds up their gradients, into the first one if it is the
only holder (PyTorch, torch/csrc/autograd/input_buffer.cpp). Under a dispatch mode it never is, so a
trace has a tensor more than other iterations have: three gradients at once at every fork of a
residual network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from types import FrameType

from torch.autograd import graph

from belady.ir.trace import StorageKind, Trace, Value

_ADD = "aten.add.Tensor"
_IN_PLACE = "aten.add_.Tensor"
# Between a mode and who calls it.
_AROUND_A_MODE = (
    "belady.measure.", "torch._dynamo", "torch._compile", "torch.utils._python_dispatch"
)  # fmt: skip
_ENGINE = graph._engine_run_backward.__code__


def may_sum(name: str) -> bool:
    """Whether the op that a mode is told of, during backward, can be such a sum.

    What runs Python code (a hook, a function of the user's) adds up as that says. Autograd calls
    the mode from a thread without any, or from where that of backward began.
    """
    if name != _ADD:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_AROUND_A_MODE):
        frame = frame.f_back
    return frame is None or frame.f_code is _ENGINE


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
        self._storages = list(trace.storages)
        self._of = {storage: list(values) for storage, values in trace.contents.items()}
        self._newest = {
            storage: max(trace.values[it].version for it in values)
            for storage, values in self._of.items()
        }

    def ends_a_node(self, at: int) -> bool:
        """Whether op ``at`` adds what its node has just made to what another made, which ends."""
        op = self._ops[at]
        if len(op.reads) != 2 or len(op.writes) != 1 or op.mutates:
            return False
        first, second, made = (self._values[value] for value in (*op.reads, *op.writes))
        into, gone = (self._storages[it.storage] for it in (first, made))
        return (
            op.forward_op is not None
            and self._node_of(first) != op.forward_op == self._node_of(second)
            and into.kind is gone.kind is StorageKind.ACTIVATION
            and into.death == at + 1
            and into.nbytes == gone.nbytes
            and made.version == 0
            and self._trace.last_drops.keys().isdisjoint((first.storage, made.storage))
        )

    def join(self, at: int) -> None:
        """Let op ``at`` write its first operand."""
        op = self._ops[at]
        into, gone = (self._values[it].storage for it in (op.reads[0], op.writes[0]))
        newest = self._newest[into] + 1
        for index in self._of.pop(gone):
            value = self._values[index]
            self._values[index] = replace(value, storage=into, version=newest + value.version)
            self._of[into].append(index)
        self._newest[into] = newest + self._newest.pop(gone)
        # It stays without bytes: others know storages by their number.
        after, end = self._storages[gone], at + 1
        self._storages[gone] = replace(after, nbytes=0, released=end, death=end)
        self._storages[into] = replace(
            self._storages[into], released=after.released, death=after.death
        )
        self._ops[at] = replace(op, name=_IN_PLACE, mutates=True)

    def trace(self) -> Trace:
        """The trace as it is now."""
        return replace(
            self._trace,
            ops=tuple(self._ops),
            storages=tuple(self._storages),
            values=tuple(self._values),
        )

    def _node_of(self, value: Value) -> int | None:
        return self._ops[value.producer].forward_op if value.producer >= 0 else None
