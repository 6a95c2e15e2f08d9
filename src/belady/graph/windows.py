"""Max pooling as kernels of Inductor's, where maxima were counted within their windows.

Inductor's own backward makes places in the image of them again, in 64 bits, for each window that an
element lies in, and compares these. Here a place within a window is compared with where the element
lies in it. Loaded only where Inductor is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch._inductor import ir, virtualized
from torch._inductor.lowering import register_lowering
from torch.utils._sympy.functions import FloorDiv

from belady.graph.pools import MAX_POOL, MAX_POOL_BACKWARD, Pair, most_over

# What a kernel of Inductor's reckons with, by `virtualized.ops`. That is no name of this module: it
# answers for any attribute, and doctest asks all that a module names for one.
Value = Any
_INT = torch.int32
# Place of what is in no window, also where columns, or a row of them, are added.
_NOWHERE = -(1 << 10)


class _Side(NamedTuple):
    """Rows, or columns, of images, and how many windows there are along them."""

    size: int
    windows: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    def at(self, window: Any, place: int) -> Any:
        """Where a place of a window lies, which may be outside."""
        return window * self.stride + place * self.dilation - self.padding

    def inside(self, at: Any) -> list[Value]:
        """What has to hold for something to be there."""
        index, found = virtualized.ops.index_expr(at, _INT), list[Value]()
        if self.padding:
            found.append(virtualized.ops.ge(index, _whole(0)))
        if self.at(self.windows - 1, self.kernel - 1) >= self.size:
            found.append(virtualized.ops.lt(index, _whole(self.size)))
        return found

    def first(self, window: Any) -> Value:
        """The first place of a window that is not outside."""
        outside = virtualized.ops.index_expr(self.padding - window * self.stride, _INT)
        short = virtualized.ops.add(
            virtualized.ops.maximum(outside, _whole(0)), _whole(self.dilation - 1)
        )
        return virtualized.ops.truncdiv(short, _whole(self.dilation))

    def covering(self, at: Any) -> Iterator[tuple[Any, Value]]:
        """Windows that can lie over a row, in order: which, and at which place.

        That is far below 0 where one does not lie over it.
        """
        at, reach = at + self.padding, (self.kernel - 1) * self.dilation
        here = virtualized.ops.index_expr(at, _INT)
        latest = virtualized.ops.index_expr(FloorDiv(at, self.stride), _INT)
        end, farthest = self.windows - 1, self.size - 1 + self.padding
        if farthest // self.stride > end:
            latest = virtualized.ops.minimum(latest, _whole(end))
        for back in reversed(range(most_over(self.kernel, self.stride, self.dilation))):
            window = virtualized.ops.sub(latest, _whole(back)) if back else latest
            apart = virtualized.ops.sub(here, virtualized.ops.mul(window, _whole(self.stride)))
            place = apart
            if self.dilation > 1:
                place = virtualized.ops.truncdiv(apart, _whole(self.dilation))
                rest = virtualized.ops.mod(apart, _whole(self.dilation))
                place = _only(virtualized.ops.eq(rest, _whole(0)), place)
            if back or max(self.stride - 1, farthest - end * self.stride) > reach:
                place = _only(virtualized.ops.le(apart, _whole(reach)), place)
            if back:
                # With large steps one before the first is too far away.
                if self.padding + self.stride <= reach:
                    place = _only(virtualized.ops.ge(window, _whole(0)), place)
                window = virtualized.ops.maximum(window, _whole(0))
            yield virtualized.ops.indirect_indexing(window, self.windows, check=False), place


def _only(holds: Value, place: Value) -> Value:
    return virtualized.ops.where(holds, place, _whole(_NOWHERE))


def _sides(image: Sequence[Any], windows: Sequence[Any], *numbers: Pair) -> list[_Side]:
    return [_Side(int(a), int(b), *it) for a, b, *it in zip(image, windows, *numbers, strict=True)]


@register_lowering(MAX_POOL, type_promotion_kind=None)
def _pooled(x: Any, *given: Any) -> tuple[Any, Any]:
    x.realize_hint()  # it is read many times
    made, places = virtualized.V.graph.current_node.meta["val"]
    rows, columns = _sides(x.get_size()[2:], made.shape[2:], *given[:4])
    load = x.make_loader()

    def value(index: Sequence[Any], row: int, column: int) -> Value:
        *before, down, across = index
        here = rows.at(down, row), columns.at(across, column)
        inside = [*rows.inside(here[0]), *columns.inside(here[1])]
        if not inside:
            return load([*before, *here])
        mask = inside.pop()
        for other in inside:
            mask = virtualized.ops.and_(mask, other)
        return virtualized.ops.masked(mask, lambda: load([*before, *here]), -math.inf)

    def walk(index: Sequence[Any]) -> tuple[Value, Value]:
        best = value(index, 0, 0)
        place = virtualized.ops.mul(rows.first(index[2]), _whole(columns.kernel))
        place = virtualized.ops.add(place, columns.first(index[3]))
        for row, column in [*product(range(rows.kernel), range(columns.kernel))][1:]:
            other = value(index, row, column)
            # The last that is none is the maximum.
            more = virtualized.ops.or_(
                virtualized.ops.gt(other, best), virtualized.ops.isnan(other)
            )
            best = virtualized.ops.where(more, other, best)
            place = virtualized.ops.where(more, _whole(row * columns.kernel + column), place)
        return best, virtualized.ops.to_dtype(place, torch.int8)

    return _made(made, lambda index: walk(index)[0]), _made(places, lambda index: walk(index)[1])


@register_lowering(MAX_POOL_BACKWARD, type_promotion_kind=None)
def _pooled_backward(grad: Any, place: Any, *given: Any) -> Any:
    for read in (grad, place):
        read.realize_hint()
    made = virtualized.V.graph.current_node.meta["val"]
    *numbers, _, size, _ = given
    rows, columns = _sides(size, grad.get_size()[2:], *numbers)
    gradient, where = grad.make_loader(), place.make_loader()
    exact = torch.promote_types(made.dtype, torch.float32)

    def total(index: Sequence[Any]) -> Value:
        *before, at_row, at_column = index
        found = None
        over = product(rows.covering(at_row), columns.covering(at_column))
        for (down, row), (across, column) in over:
            here = virtualized.ops.add(virtualized.ops.mul(row, _whole(columns.kernel)), column)
            taken = virtualized.ops.to_dtype(where([*before, down, across]), _INT)
            taken = virtualized.ops.eq(taken, here)
            part = virtualized.ops.to_dtype(gradient([*before, down, across]), exact)
            part = virtualized.ops.where(taken, part, virtualized.ops.constant(0.0, exact))
            found = part if found is None else virtualized.ops.add(found, part)
        return found

    return _made(made, total)


def _whole(number: int) -> Value:
    # With 64 bits a GPU takes several times as long to divide and to compare.
    return virtualized.ops.constant(number, _INT)


def _made(like: torch.Tensor, inner: Callable[[Sequence[Any]], Value]) -> Any:
    """A result, which lies as it was traced."""
    device, dtype, ranges = like.device, like.dtype, [*like.shape]
    made = ir.Pointwise.create(device=device, dtype=dtype, inner_fn=inner, ranges=ranges)
    return ir.ExternKernel.require_stride_order(made, ir.get_stride_order(like.stride()))
