"""Ways to differentiate one sample of one operator, and what comes out of each."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.training import raw

Saving = Callable[[], AbstractContextManager[Any]]
# Tensors that came out, or the error that did.
Outcome = "list[Tensor] | Exception"


class Mode(Enum):
    """How a sample is differentiated."""

    TWICE = "backward, and again with the graph retained"
    DOUBLE = "gradients of gradients, inside the context"
    IN_PLACE = "the operator's in-place variant"
    FRESH = "backward, nothing overwritten"
    STALE_FIRST = "the first tensor given is overwritten before backward"
    STALE_LAST = "the last tensor given is overwritten before backward"
    STALE_RESULT = "the result is overwritten before backward"


@dataclass
class Report:
    """What came of one operator."""

    compared: int = 0
    unrepeatable: int = 0
    failures: list[str] = field(default_factory=list)


class Sample:
    """Arguments of one call, copied anew for each run; seeds are part of them."""

    def __init__(self, function: Callable[..., Any], sample: Any) -> None:
        self.function = function
        self._given = (sample.input, sample.args, sample.kwargs)
        self._process = sample.output_process_fn_grad

    def arguments(self) -> Any:
        return tree_map_only(Tensor, duplicate, self._given)

    def call(self, given: Any) -> list[Tensor]:
        """Run the operator; gives the results that can be differentiated."""
        first, args, kwargs = given
        results = tree_leaves(self._process(self.function(first, *args, **kwargs)))
        return [t for t in results if isinstance(t, Tensor) and t.requires_grad]


def duplicate(tensor: Tensor) -> Tensor:
    """A leaf with the same bytes in the same places of a storage of its own."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    copy = torch._conj(copy) if tensor.is_conj() else copy
    copy = torch._neg_view(copy) if tensor.is_neg() else copy
    return copy.requires_grad_(tensor.requires_grad)


def differentiate(sample: Sample, mode: Mode, saving: Saving = nullcontext) -> Any:
    """Run forward inside ``saving`` and backward as ``mode`` says; gives an Outcome."""
    torch.manual_seed(7)
    given = sample.arguments()
    try:
        return [t.detach().clone() for t in _MODES[mode](sample, given, saving)]
    except Exception as error:
        return error.with_traceback(None)


def _twice(sample: Sample, given: Any, saving: Saving) -> list[Tensor]:
    with saving():
        results = sample.call(given)
    leaves = _leaves(given)
    weights = [torch.randn_like(t) for t in results]
    first = torch.autograd.grad(results, leaves, weights, retain_graph=True, allow_unused=True)
    again = torch.autograd.grad(results, leaves, weights, allow_unused=True)
    return _present(results, first, again)


def _double(sample: Sample, given: Any, saving: Saving) -> list[Tensor]:
    leaves = _leaves(given)
    with saving():
        results = sample.call(given)
        weights = [torch.randn_like(t).requires_grad_() for t in results]
        first = torch.autograd.grad(results, leaves, weights, create_graph=True, allow_unused=True)
    again = [t for t in first if t is not None and t.requires_grad]
    pull = [torch.randn_like(t) for t in again]
    second = torch.autograd.grad(again, [*leaves, *weights], pull, allow_unused=True)
    return _present(first, second)


def _in_place(sample: Sample, given: Any, saving: Saving) -> list[Tensor]:
    first, args, kwargs = given
    with saving():
        # A leaf cannot be changed in place, so the operator changes a copy of it.
        results = sample.call((tree_map_only(Tensor, torch.clone, first), args, kwargs))
    weights = [torch.randn_like(t) for t in results]
    return _present(
        results, torch.autograd.grad(results, _leaves(given), weights, allow_unused=True)
    )


def _overwritten(mode: Mode, sample: Sample, given: Any, saving: Saving) -> list[Tensor]:
    with saving():
        results = sample.call(given)
    weights = [torch.randn_like(t) for t in results]
    tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    victims = {
        Mode.FRESH: [],
        Mode.STALE_FIRST: tensors[:1],
        Mode.STALE_LAST: tensors[-1:],
        Mode.STALE_RESULT: results[:1],
    }
    with torch.no_grad(), suppress(RuntimeError):  # one that overlaps itself cannot be written
        for victim in victims[mode]:
            victim.zero_()
    return _present(torch.autograd.grad(results, _leaves(given), weights, allow_unused=True))


STALE = (Mode.STALE_FIRST, Mode.STALE_LAST, Mode.STALE_RESULT)
_MODES: dict[Mode, Callable[[Sample, Any, Saving], list[Tensor]]] = {
    Mode.TWICE: _twice,
    Mode.DOUBLE: _double,
    Mode.IN_PLACE: _in_place,
    **{mode: functools.partial(_overwritten, mode) for mode in (Mode.FRESH, *STALE)},
}


def left_over(sample: Sample, saving: Saving = nullcontext) -> int:
    """Storages that outlive a forward whose results are thrown away, without any collection."""
    watched: list[StorageWeakRef] = []

    def forward() -> None:
        given = sample.arguments()
        with suppress(Exception), saving():
            results = sample.call(given)
            watched.extend(
                StorageWeakRef(t.untyped_storage())
                for t in [*tree_leaves(given), *results]
                if isinstance(t, Tensor) and torch._C._has_storage(t)
            )

    torch.manual_seed(7)
    gc.disable()
    try:
        forward()
        return sum(not storage.expired() for storage in watched)
    finally:
        gc.enable()


def same(expected: Any, actual: Any) -> bool:
    """Whether two outcomes are equal in every bit, or errors of one kind."""
    if isinstance(expected, Exception) or isinstance(actual, Exception):
        return isinstance(actual, type(expected))
    return len(expected) == len(actual) and all(map(_equal, expected, actual))


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    return all(map(torch.equal, map(raw, _parts(a)), map(raw, _parts(b))))


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def _leaves(given: Any) -> list[Tensor]:
    return [t for t in tree_leaves(given) if isinstance(t, Tensor) and t.requires_grad]


def _present(*groups: Any) -> list[Tensor]:
    return [t for group in groups for t in group if t is not None]


def thin(items: list[Any], limit: int) -> list[Any]:
    """At most ``limit`` of the items, evenly spread."""
    if len(items) <= limit:
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def samples(op: Any, device: str, dtype: torch.dtype, limit: int) -> Iterator[Any]:
    """Samples as the database makes them, and with other strides."""
    torch.manual_seed(0)
    found = list(op.sample_inputs(device, dtype, requires_grad=True))
    for sample in thin(found, limit):
        yield sample
        with suppress(NotImplementedError, RuntimeError):
            yield sample.noncontiguous()
