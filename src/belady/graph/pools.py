"""Where the maxima of pooling were: a byte for each, counted within its window.

torch saves for each maximum the place in the whole image, in eight bytes: four times what the
maximum itself takes in half precision. Inductor counts within windows where it compiles a whole
graph (``_low_memory_max_pool_with_offsets``); what crosses from one of our segments to another
crosses as the graph says.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from belady.graph.doors import fake_value
from belady.graph.ops import POOLED

_aten = torch.ops.aten
_POOL = _aten.max_pool2d_with_indices.default
_BACKWARD = _aten.max_pool2d_with_indices_backward.default
_MOST = torch.iinfo(torch.int8).max + 1
# Elements that are counted otherwise at once, op by op: the rest waits, so little is held.
_PIECE = 1 << 22

# Rows and columns.
Pair = Sequence[int]


def in_window(
    index: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, width: int
) -> Tensor:
    """Places within windows, of places in images of ``width`` columns.

    Parameters
    ----------
    index
        (samples, channels, rows, columns), int64, as max pooling gives it.
    """
    row = index // width
    rows, columns = _corners(index, stride, padding)
    below, beside = row - rows, index - row * width - columns
    return (below // dilation[0] * kernel[1] + beside // dilation[1]).to(torch.int8)


def in_image(
    place: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, width: int
) -> Tensor:
    """Places in images of ``width`` columns, of places within windows: int64."""
    whole = place.to(torch.int64)
    row = whole // kernel[1]
    rows, columns = _corners(place, stride, padding)
    return (rows + row * dilation[0]) * width + columns + (whole - row * kernel[1]) * dilation[1]


def _corners(like: Tensor, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    """Row and column of the first element of each window, which padding may have outside."""
    rows, columns = (
        torch.arange(count, device=like.device) * step - pad
        for count, step, pad in zip(like.shape[-2:], stride, padding, strict=True)
    )
    return rows.unsqueeze(-1), columns


def _piecewise(function: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    """``function`` op by op, of some samples at a time."""

    def run(whole: Tensor, *numbers: Any) -> Tensor:
        made = torch.empty_like(whole, dtype=dtype)
        samples = max(1, _PIECE // max(1, whole[:1].numel()))
        for part, of in zip(torch.split(made, samples), torch.split(whole, samples), strict=True):
            part.copy_(function(of, *numbers))
        return made

    return run


_NUMBERS = "int[] kernel, int[] stride, int[] padding, int[] dilation, int width"
_PLACES: tuple[tuple[str, Callable[..., Tensor], torch.dtype], ...] = (
    ("in_window", in_window, torch.int8),
    ("in_image", in_image, torch.int64),
)
# What a compiler gets in the place of the operators.
COMPILED: dict[Any, Callable[..., Tensor]] = {}
for _name, _function, _dtype in _PLACES:
    torch.library.define(f"belady::{_name}", f"(Tensor places, {_NUMBERS}) -> Tensor")
    torch.library.impl(f"belady::{_name}", "default", _piecewise(_function, _dtype))
    torch.library.register_fake(
        f"belady::{_name}", lambda whole, *_, dtype=_dtype: torch.empty_like(whole, dtype=dtype)
    )
    COMPILED[getattr(torch.ops.belady, _name).default] = _function
IN_WINDOW, IN_IMAGE = COMPILED
assert {str(target) for target in COMPILED} == POOLED


def count_in_windows(joint: fx.GraphModule) -> None:
    """Have backward read where maxima were within their windows, with the same bits.

    Parameters
    ----------
    joint
        A joint graph. It is changed: of pooling of images in batches whose windows have no more
        places than a byte counts, and of which only backward asks where maxima were.
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


def _is_small(pool: fx.Node) -> bool:
    return fake_value(pool.args[0]).dim() == 4 and math.prod(_numbers(pool)[0]) <= _MOST  # type: ignore[arg-type]


def _numbers(pool: fx.Node) -> tuple[Pair, Pair, Pair, Pair]:
    """Kernel, stride, padding and dilation, of rows and of columns."""
    given: list[Any] = [*pool.args[1:5], *([()] * 4)][:4]
    several = ([it] if isinstance(it, int) else [*it] for it in given)
    kernel, stride, padding, dilation = (it * 2 if len(it) == 1 else it for it in several)
    return kernel, stride or kernel, padding or [0, 0], dilation or [1, 1]


def _rewrite(pool: fx.Node, index: fx.Node) -> None:
    numbers = (*_numbers(pool), fake_value(pool.args[0]).shape[-1])  # type: ignore[arg-type]
    readers = [*index.users]
    with index.graph.inserting_after(index):
        place = _call(IN_WINDOW, (index, *numbers), index)
    for reader in readers:
        with index.graph.inserting_before(reader):
            again = _call(IN_IMAGE, (place, *numbers), reader)
        reader.replace_input_with(index, again)


def _call(target: Any, args: tuple[Any, ...], beside: fx.Node) -> fx.Node:
    node = args[0].graph.call_function(target, args)
    assert isinstance(node, fx.Node)
    node.meta = {**beside.meta, "val": target(fake_value(args[0]), *args[1:])}
    node.meta.pop("tensor_meta", None)
    return node
