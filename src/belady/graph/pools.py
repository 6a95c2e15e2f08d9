"""Max pooling that saves a byte for each maximum, counted within its window, and reads that.

torch saves for each maximum the place in the whole image, in eight bytes: four times what the
maximum itself takes in half precision. Inductor counts within windows where it compiles a whole
graph (``_low_memory_max_pool_with_offsets``); what crosses from one of our segments to another
crosses as the graph says.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from belady.graph.doors import fake_value
from belady.graph.ops import POOLED

_aten = torch.ops.aten
_POOL = _aten.max_pool2d_with_indices.default
_BACKWARD = _aten.max_pool2d_with_indices_backward.default
# Windows of more places, and elements in more windows, would make long kernels.
_MOST = 25
# Elements that torch's own kernels pool at once: the rest waits, so little is held.
_PIECE = 1 << 22

# Rows and columns.
Pair = Sequence[int]


def _in_window(
    index: Tensor, width: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Places within windows, of places in images of ``width`` columns; -1 for one outside.

    torch's kernel for channels that lie last on a GPU gives place 0 of the image where all of a
    window is minus infinity, so that nothing gets its gradient.
    """
    row = index // width
    rows, columns = _corners(index, stride, padding)
    below = torch.div(row - rows, dilation[0], rounding_mode="floor")
    beside = torch.div(index - row * width - columns, dilation[1], rounding_mode="floor")
    inside = (below >= 0) & (below < kernel[0]) & (beside >= 0) & (beside < kernel[1])
    return torch.where(inside, below * kernel[1] + beside, -1).to(torch.int8)


def _in_image(
    place: Tensor, width: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Places in images of ``width`` columns, of places within windows: int64."""
    whole = place.to(torch.int64)
    row = whole // kernel[1]
    rows, columns = _corners(place, stride, padding)
    column = columns + (whole - row * kernel[1]) * dilation[1]
    return torch.where(whole < 0, 0, (rows + row * dilation[0]) * width + column)


def _lies_last(tensor: Tensor) -> bool:
    """Whether channels lie last in memory, and cannot be said to lie first."""
    last = tensor.is_contiguous(memory_format=torch.channels_last)
    return last and not tensor.is_contiguous()


def _corners(like: Tensor, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    """Row and column of the first element of each window, which padding may have outside."""
    rows, columns = (
        torch.arange(count, device=like.device) * step - pad
        for count, step, pad in zip(like.shape[-2:], stride, padding, strict=True)
    )
    return rows.unsqueeze(-1), columns


def _pooled(x: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    """Maxima and their places by torch's own kernels, of some samples at a time."""
    made, places = _like_pooled(x, *numbers)
    parts = zip(*(_pieces(it, x) for it in (x, made, places)), strict=True)
    for part, maxima, place in parts:
        found, index = _POOL(part, *numbers)
        maxima.copy_(found)
        place.copy_(_in_window(index, x.shape[-1], *numbers[:4]))
    return made, places


def _pooled_backward(grad: Tensor, place: Tensor, *given: Any) -> Tensor:
    """The gradient of what was pooled by torch's own kernels, of some samples at a time."""
    *numbers, ceil_mode, size, _ = given
    made = _like_image(grad, place, *given)
    parts = zip(*(_pieces(it, made) for it in (grad, place, made)), strict=True)
    for part, where, result in parts:
        index = _in_image(where, size[-1], *numbers)
        # Of what was pooled only the shape is asked.
        result.copy_(_BACKWARD(part, result, *numbers, ceil_mode, index))
    return made


def _pieces(tensor: Tensor, of: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor, max(1, _PIECE // max(1, of[:1].numel())))


def _like_pooled(x: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    made, _ = _POOL(like, *numbers)
    there = torch.empty_strided(made.shape, made.stride(), dtype=x.dtype, device=x.device)
    return there, torch.empty_like(there, dtype=torch.int8)


def _like_image(grad: Tensor, place: Tensor, *given: Any) -> Tensor:
    *_, size, last = given
    layout = torch.channels_last if last else torch.contiguous_format
    shape = *grad.shape[:2], *size
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=layout)


_NUMBERS = "int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
_OPERATORS = (
    ("max_pool", f"(Tensor x, {_NUMBERS}) -> (Tensor, Tensor)", _pooled, _like_pooled),
    (
        "max_pool_backward",
        f"(Tensor grad, Tensor place, {_NUMBERS}, int[] size, bool last) -> Tensor",
        _pooled_backward,
        _like_image,
    ),
)
for _name, _schema, _run, _fake in _OPERATORS:
    torch.library.define(f"belady::{_name}", _schema)
    torch.library.impl(f"belady::{_name}", "default", _run)
    torch.library.register_fake(f"belady::{_name}", _fake)
MAX_POOL = torch.ops.belady.max_pool.default
MAX_POOL_BACKWARD = torch.ops.belady.max_pool_backward.default
assert {str(MAX_POOL), str(MAX_POOL_BACKWARD)} == POOLED


def count_in_windows(joint: fx.GraphModule) -> None:
    """Have pooling save a byte for each maximum, and backward read that: with the same maxima.

    Parameters
    ----------
    joint
        A joint graph. It is changed: of pooling of images in batches in small windows, of which
        only backward asks where maxima were.
    """
    found = [
        (pool, part)
        for pool in joint.graph.find_nodes(op="call_function", target=_POOL)
        for part in pool.users
        if part.target is operator.getitem and part.args[1] == 1 and _is_small(pool)
        if part.users and all(user.target is _BACKWARD for user in part.users)
    ]
    for pool, index in found:
        _rewrite(pool, index)
    if found:
        joint.recompile()


def most_over(kernel: int, stride: int, dilation: int) -> int:
    """The most windows that lie over one row, or column."""
    return (kernel - 1) * dilation // stride + 1


def _is_small(pool: fx.Node) -> bool:
    kernel, stride, _, dilation = _numbers(pool)
    over = math.prod(map(most_over, kernel, stride, dilation))
    x = fake_value(pool.args[0])  # type: ignore[arg-type]
    dense = x.is_contiguous() or _lies_last(x)
    return dense and x.dim() == 4 and max(math.prod(kernel), over) <= _MOST


def _numbers(pool: fx.Node) -> tuple[Pair, Pair, Pair, Pair]:
    """Kernel, stride, padding and dilation, of rows and of columns."""
    given: list[Any] = [*pool.args[1:5], *([()] * 4)][:4]
    several = ([it] if isinstance(it, int) else [*it] for it in given)
    kernel, stride, padding, dilation = (it * 2 if len(it) == 1 else it for it in several)
    return kernel, stride or kernel, padding or [0, 0], dilation or [1, 1]


def _rewrite(pool: fx.Node, index: fx.Node) -> None:
    x, numbers = pool.args[0], (*_numbers(pool), bool(pool.args[5:] and pool.args[5]))
    assert isinstance(x, fx.Node)
    # One window for all of an image lies both ways, and does not say how the image does.
    lies, readers = ([*fake_value(x).shape[-2:]], _lies_last(fake_value(x))), [*index.users]
    pool.target, pool.args = MAX_POOL, (x, *numbers)
    pool.meta["val"] = MAX_POOL(fake_value(x), *numbers)
    _, index.meta["val"] = pool.meta["val"]
    for reader in readers:
        reader.target = MAX_POOL_BACKWARD
        reader.args = (reader.args[0], index, *numbers, *lies)
        given = (fake_value(it) for it in reader.args[:2])  # type: ignore[arg-type]
        made, known = MAX_POOL_BACKWARD(*given, *numbers, *lies), fake_value(reader)
        # What shows parts of it was traced on the bytes of what is known of it.
        reader.meta["val"] = known.as_strided(made.shape, made.stride())
    for node in (pool, index, *readers):
        node.meta.pop("tensor_meta", None)
