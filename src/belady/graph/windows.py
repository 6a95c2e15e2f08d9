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
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv

from belady.graph.pools import MAX_POOL, MAX_POOL_BACKWARD, Pair, most_over

# What an Inductor's kernel reckons with, and an index in it.
Value = Any
_INT = torch.int32


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
        index, found = ops.index_expr(at, _INT), list[Value]()
        if self.padding:
            found.append(ops.ge(index, _whole(0)))
        if self.at(self.windows - 1, self.kernel - 1) >= self.size:
            found.append(ops.lt(index, _whole(self.size)))
        return found

    def first(self, window: Any) -> Value:
        """The first place of a window that is not outside."""
        outside = ops.index_expr(self.padding - window * self.stride, _INT)
        short = ops.add(ops.maximum(outside, _whole(0)), _whole(self.dilation - 1))
        return ops.truncdiv(short, _whole(self.dilation))

    def covering(self, at: Any) -> Iterator[tuple[Any, Value, Value]]:
        """Windows that can lie over a row, in order: which, at which place, and whether it does."""
        at = at + self.padding
        latest = ops.index_expr(FloorDiv(at, self.stride), _INT)
        latest = ops.minimum(latest, _whole(self.windows - 1))
        for back in reversed(range(most_over(self.kernel, self.stride, self.dilation))):
            window = ops.sub(latest, _whole(back))
            apart = ops.sub(ops.index_expr(at, _INT), ops.mul(window, _whole(self.stride)))
            reach = _whole((self.kernel - 1) * self.dilation)
            there = ops.and_(ops.ge(window, _whole(0)), ops.le(apart, reach))
            if self.dilation > 1:
                rest = ops.mod(apart, _whole(self.dilation))
                there = ops.and_(there, ops.eq(rest, _whole(0)))
                apart = ops.truncdiv(apart, _whole(self.dilation))
            some = ops.maximum(window, _whole(0))
            yield ops.indirect_indexing(some, self.windows, check=False), apart, there


def _sides(image: Sequence[Any], windows: Sequence[Any], *numbers: Pair) -> list[_Side]:
    return [_Side(int(a), int(b), *it) for a, b, *it in zip(image, windows, *numbers, strict=True)]


@register_lowering(MAX_POOL, type_promotion_kind=None)
def _pooled(x: Any, *given: Any) -> tuple[Any, Any]:
    x.realize_hint()  # it is read many times
    made, places = V.graph.current_node.meta["val"]
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
            mask = ops.and_(mask, other)
        return ops.masked(mask, lambda: load([*before, *here]), -math.inf)

    def walk(index: Sequence[Any]) -> tuple[Value, Value]:
        best = value(index, 0, 0)
        place = ops.mul(rows.first(index[2]), _whole(columns.kernel))
        place = ops.add(place, columns.first(index[3]))
        for row, column in [*product(range(rows.kernel), range(columns.kernel))][1:]:
            other = value(index, row, column)
            # The last that is none is the maximum.
            more = ops.or_(ops.gt(other, best), ops.isnan(other))
            best = ops.where(more, other, best)
            place = ops.where(more, _whole(row * columns.kernel + column), place)
        return best, ops.to_dtype(place, torch.int8)

    return _made(made, lambda index: walk(index)[0]), _made(places, lambda index: walk(index)[1])


@register_lowering(MAX_POOL_BACKWARD, type_promotion_kind=None)
def _pooled_backward(grad: Any, place: Any, *given: Any) -> Any:
    for read in (grad, place):
        read.realize_hint()
    made = V.graph.current_node.meta["val"]
    *numbers, _, size, _ = given
    rows, columns = _sides(size, grad.get_size()[2:], *numbers)
    gradient, where = grad.make_loader(), place.make_loader()
    exact = torch.promote_types(made.dtype, torch.float32)

    def total(index: Sequence[Any]) -> Value:
        *before, at_row, at_column = index
        found = None
        over = product(rows.covering(at_row), columns.covering(at_column))
        for (down, row, above), (across, column, beside) in over:
            here = ops.add(ops.mul(row, _whole(columns.kernel)), column)
            taken = ops.eq(ops.to_dtype(where([*before, down, across]), _INT), here)
            taken = ops.and_(ops.and_(above, beside), taken)
            part = ops.to_dtype(gradient([*before, down, across]), exact)
            part = ops.where(taken, part, ops.constant(0.0, exact))
            found = part if found is None else ops.add(found, part)
        return found

    return _made(made, total)


def _whole(number: int) -> Value:
    # With 64 bits a GPU takes several times as long to divide and to compare.
    return ops.constant(number, _INT)


def _made(like: torch.Tensor, inner: Callable[[Sequence[Any]], Value]) -> Any:
    """A result, which lies as it was traced."""
    device, dtype, ranges = like.device, like.dtype, [*like.shape]
    made = ir.Pointwise.create(device=device, dtype=dtype, inner_fn=inner, ranges=ranges)
    return ir.ExternKernel.require_stride_order(made, ir.get_stride_order(like.stride()))
