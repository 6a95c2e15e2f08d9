"""Sums of gradients as autograd makes them where nothing watches: in place.

Where a value has several readers, autograd adds up their gradients, into the first one if it is the
only holder (PyTorch, torch/csrc/autograd/input_buffer.cpp). Under a dispatch mode it asks for a new
tensor always: three gradients at once at every fork of a residual network. A recorder that knows
`only_holder` adds in place as well, so that the observed iteration needs no more than others do; in
a trace of what has not run `in_place` shows the sums so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch.autograd import forward_ad, graph
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from belady.ir.trace import StorageKind, Trace, Value
from belady.measure.records import RawOp

INTO = torch.ops.aten.add_.Tensor
_ADD = "aten.add.Tensor"
_IN_PLACE = str(INTO)
# Nodes whose backward is one op, or ops that are no sums. Names as Python has them.
ADDING_NOTHING = frozenset(
    f"{name}Backward0"
    for name in (
        "Add", "Addmm", "AvgPool2D", "Bmm", "Cat", "Convolution", "CudnnBatchNorm", "Gelu",
        "MaxPool2DWithIndices", "Mm", "NativeBatchNorm", "NativeLayerNorm", "Permute", "Relu",
        "Silu", "T", "ToCopy", "Transpose", "UnsafeView", "View",
    )
)  # fmt: skip
# Tells of an addition of autograd's whether it may write its first operand.
Holds = Callable[[tuple[Any, ...]], bool]
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
    return (frame is None or frame.f_code is _ENGINE) and not _is_transformed()


def _is_transformed() -> bool:
    """Whether tensors may be wrapped, or dual: who holds a wrapper is not counted, and is plain's.

    `torch.func` refuses hooks on saved tensors meanwhile.
    """
    hooks_off = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return hooks_off is not None or forward_ad._current_level >= 0


def adds_nothing(node: Any) -> bool:
    """Whether the formula of a node is known to have no sum of its own.

    C++ code calls a mode in the same way as autograd, which adds up what a node made while that is
    still the current one; and a formula may go on to use what it has added to. So these are known
    by name (PyTorch, tools/autograd/derivatives.yaml); nodes of others have another type.
    """
    return type(node).__name__ in ADDING_NOTHING


def nobody(operands: tuple[Any, ...]) -> bool:
    """Of no addition."""
    return False


def only_holder(device: torch.device) -> Holds:
    """Whether autograd alone holds the first of two operands, as for one that it does hold alone.

    The answer of a mode's `__torch_dispatch__` on ``device``; `nobody` where it cannot be known.
    References are counted as autograd does, and those to Python's object, which is one holder for
    autograd however many there are. What one more holder adds differs from version to version of
    torch, so they are compared with those of a sum that was made for it. It is asked of a node that
    `adds_nothing`.
    """
    alone: list[tuple[int, ...]] = []
    # Whoever looks into frames may hold what is counted there.
    if sys.gettrace() or sys.getprofile():
        return nobody
    with (
        suppress(AttributeError, RuntimeError),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        _Counting(alone),
    ):
        source = torch.ones(1, device=device, requires_grad=True)
        fork = source.neg()
        # Nothing is saved, and so no hook of anybody's is called.
        torch.autograd.grad(fork.neg() + fork.neg(), source)
    if len(alone) != 1:
        return nobody

    def holds(operands: tuple[Any, ...]) -> bool:
        return _are_alike(*operands) and _holders(operands) == alone[0]

    return holds


class _Counting(TorchDispatchMode):
    """Counts the holders of what autograd adds to."""

    def __init__(self, found: list[tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if may_sum(str(func)):
            self._found.append(_holders(args))
        return func(*args, **(kwargs or {}))


def _holders(operands: tuple[Any, ...]) -> tuple[int, ...]:
    """References to the first operand, to its storage, and to Python's object."""
    first = operands[0]
    storage = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return first._use_count(), storage, sys.getrefcount(first)


def _are_alike(first: Any, second: Any) -> bool:
    """Whether both are plain tensors of one shape and type, the first without gaps."""
    plain = type(first) is type(second) is torch.Tensor
    if not plain or first.layout is not torch.strided or first._is_zerotensor():
        return False
    about = (second.layout, second.dtype, second.device, second.shape)
    same = (first.layout, first.dtype, first.device, first.shape) == about
    return same and _is_dense(first)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element has a place of its own, and there are no others between."""
    apart = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != apart:
            return False
        apart *= size
    return True


def unwatched(trace: Trace, ops: Iterable[RawOp]) -> Trace:
    """The trace of recorded ``ops`` as iterations that nobody watches have it.

    On a CPU memory is counted by watching, and so is what the trace says.
    """
    if trace.device == "cpu":
        return trace
    return in_place(trace, (at for at, op in enumerate(ops) if op.may_sum))


def in_place(trace: Trace, candidates: Iterable[int]) -> Trace:
    """The trace with sums of gradients in the place of the first, where that one ends with them.

    Parameters
    ----------
    candidates
        Ops of which `may_sum` was true, of what nobody wrote in place.
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
