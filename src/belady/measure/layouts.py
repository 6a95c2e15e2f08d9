"""How the operands of every op lie in their storages, and which numbers it is called with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from belady.measure.recorder import Recorder
from belady.measure.records import RawOp, tensors_in
from belady.memory.geometry import shape_of, unseen

# Arguments that say how large a tensor is to be: as large as the batch asks for.
_SIZES = frozenset({"size", "stride", "N"})
# Ops that act along the dimension that this argument names, and keep it.
_ALONG = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "cat"})


class Laid(NamedTuple):
    """Where a tensor lies, in bytes; ``storage`` is -1 where none is recorded."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Issued(NamedTuple):
    """A call of an op.

    Attributes
    ----------
    operands, results
        Tensors, in order.
    numbers
        All other arguments but sizes, and the numbers that were made a tensor of.
    along
        The dimension of its operands along which it acts and which it keeps, or None.
    """

    operands: tuple[Laid, ...]
    results: tuple[Laid, ...]
    numbers: tuple[str, ...]
    along: int | None


class LayoutRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Takes down as well how tensors lie.

    Attributes
    ----------
    issued
        The call of every op.
    """

    issued: list[Issued]

    def _begin(self, func: Any, args: tuple[Any, ...], kwargs: Any, gap: float) -> RawOp:
        if not self.ops:
            self.issued = []
        op = super()._begin(func, args, kwargs, gap)
        operands = tuple(map(self._laid, tensors_in((*args, *kwargs.values()))))
        numbers = tuple(_numbers(func, args, kwargs))
        self.issued.append(Issued(operands, (), numbers, _along(func, args, kwargs)))
        return op

    def _end(self, op: RawOp, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        super()._end(op, func, args, kwargs, result)
        results = tuple(map(self._laid, tensors_in((result,))))
        self.issued[-1] = self.issued[-1]._replace(results=results)

    def _laid(self, tensor: torch.Tensor) -> Laid:
        storage = self._storage_of(tensor) if self._visible(tensor) else -1
        if storage < 0:
            return Laid(-1, shape_of(tensor), (), 0)
        size = tensor.element_size()
        stride = tuple(size * it for it in tensor.stride())
        return Laid(storage, shape_of(tensor), stride, size * int(tensor.storage_offset()))


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    schema = getattr(func, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if position < len(args):
            yield argument.name, args[position]
        else:
            yield argument.name, kwargs.get(argument.name, argument.default_value)


def _numbers(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[str]:
    for name, given in _named(func, args, kwargs):
        for leaf in tree_leaves(given):
            if not isinstance(leaf, torch.Tensor):
                if name not in _SIZES:
                    # As text: NaN is not equal to itself, and 1 is to True.
                    yield repr(leaf)
            elif func is torch.ops.aten.lift_fresh.default and type(leaf) is torch.Tensor:
                # What numbers were made a tensor of.
                with unseen():
                    yield repr(leaf.tolist())


def _along(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    if str(func).removeprefix("aten.").split(".")[0] not in _ALONG:
        return None
    (dim,) = (given for name, given in _named(func, args, kwargs) if name == "dim")
    rank = max(tensor.dim() for tensor in tensors_in(args))
    return int(dim) % rank if rank else None
