"""Max pooling in kernels that a compiler makes: where maxima were is counted within windows.

torch counts through the whole image, and so does the backward that Inductor has for it: for each
window that an element lies in it makes the place in the image, and compares these. Here a place
within a window is compared with where the element lies in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten

# Rows and columns.
Pair = Sequence[int]


def pooled(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Maxima, with the bits of torch's own, and where they were; to be compiled.

    Parameters
    ----------
    x
        (samples, channels, rows, columns).

    Returns
    -------
    tuple
        (samples, channels, rows, columns) of windows; the second one int8, in the order of rows.
    """
    numbers = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    sides = rows, columns = [_Side.of(*it, ceil_mode) for it in numbers]
    around = [it for side in reversed(sides) for it in (side.padding, side.beyond)]
    padded = F.pad(x, around, value=-math.inf)
    first = rows.first(x.device).unsqueeze(-1) * columns.kernel + columns.first(x.device)
    best = place = None
    for row, column in product(range(rows.kernel), range(columns.kernel)):
        value = padded[:, :, rows.all_at(row), columns.all_at(column)]
        if best is None or place is None:
            best = value.clone()
            place = torch.zeros_like(best, dtype=torch.int32) + first
            continue
        # The last that is none is the maximum.
        more = (value > best) | value.isnan()
        best = torch.where(more, value, best)
        place = torch.where(more, row * columns.kernel + column, place)
    assert best is not None
    assert place is not None
    return best, place.to(torch.int8)


def pooled_backward(
    grad: Tensor,
    place: Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    ceil_mode: bool,
    size: Pair,
) -> Tensor:
    """The gradient of what was pooled, added up in the order of windows; to be compiled.

    Parameters
    ----------
    grad, place
        (samples, channels, rows, columns) of windows; what `pooled` gives.
    size
        Rows and columns of what was pooled.
    """
    numbers = zip(size, kernel, stride, padding, dilation, strict=True)
    rows, columns = (_Side.of(*it, ceil_mode) for it in numbers)
    last = lies_last(place)
    before = [None] if last else [None, None]
    if last:
        grad, place = grad.permute(0, 2, 3, 1), place.permute(0, 2, 3, 1)
    exact, total = torch.promote_types(grad.dtype, torch.float32), None
    over = product(rows.covering(grad.device), columns.covering(grad.device))
    for (down, row, above), (across, column, beside) in over:
        index = [*before, down.unsqueeze(-1), across]
        here = row.unsqueeze(-1) * columns.kernel + column
        here = torch.where(above.unsqueeze(-1) & beside, here, -1)
        found = _aten._unsafe_index(place, index) == (here.unsqueeze(-1) if last else here)
        part = torch.where(found, _aten._unsafe_index(grad, index).to(exact), 0.0)
        total = part if total is None else total + part
    assert total is not None
    result: Tensor = total.to(grad.dtype)
    return result.permute(0, 3, 1, 2) if last else result


def most_over(kernel: int, stride: int, dilation: int) -> int:
    """The most windows that lie over one row, or column."""
    return (kernel - 1) * dilation // stride + 1


def lies_last(tensor: Tensor) -> bool:
    """Whether channels lie last in memory, and cannot be said to lie first."""
    last = tensor.is_contiguous(memory_format=torch.channels_last)
    return last and not tensor.is_contiguous()


class _Side(NamedTuple):
    """Rows, or columns, and how many windows there are along them."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    windows: int

    @classmethod
    def of(
        cls, size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
    ) -> _Side:
        rest = size + 2 * padding - dilation * (kernel - 1) - 1
        count = (-(-rest // stride) if ceil_mode else rest // stride) + 1
        # None begins behind all that is there.
        count -= ceil_mode and (count - 1) * stride >= size + padding
        return cls(size, kernel, stride, padding, dilation, count)

    @property
    def beyond(self) -> int:
        """How far the last window reaches over the end."""
        end = (self.windows - 1) * self.stride + (self.kernel - 1) * self.dilation + 1
        return max(0, end - self.padding - self.size)

    def all_at(self, place: int) -> slice:
        """What lies at one place of each window, where padding lies before and behind."""
        first = place * self.dilation
        return slice(first, first + (self.windows - 1) * self.stride + 1, self.stride)

    def first(self, device: torch.device) -> Tensor:
        """The first place of each window that is not padding."""
        outside = (self.padding - _to(self.windows, device) * self.stride).clamp(min=0)
        return _whole(outside + self.dilation - 1, self.dilation)

    def covering(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Windows over each row, in order: which, at which place of it, and whether it is."""
        at = _to(self.size, device) + self.padding
        latest = _whole(at, self.stride).clamp(max=self.windows - 1)
        for back in reversed(range(most_over(self.kernel, self.stride, self.dilation))):
            window = latest - back
            apart = at - window * self.stride
            there = (window >= 0) & (apart <= (self.kernel - 1) * self.dilation)
            there = there & (apart % self.dilation == 0)
            yield window.clamp(min=0), _whole(apart, self.dilation), there


def _to(count: int, device: torch.device) -> Tensor:
    # With 64 bits a GPU takes several times as long to divide and to compare.
    return torch.arange(count, device=device, dtype=torch.int32)


def _whole(dividend: Tensor, divisor: int) -> Tensor:
    """How often it goes into each, of which none is below 0."""
    return torch.div(dividend, divisor, rounding_mode="trunc")
