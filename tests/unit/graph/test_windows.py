"""Which windows lie over a row, as kernels reckon it, is what counting them one by one gives."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import max_pool1d


class Numbers:
    """Kernels' arithmetic with whole numbers, as C has it."""

    add, sub, mul = map(staticmethod, (operator.add, operator.sub, operator.mul))
    le, ge, eq = map(staticmethod, (operator.le, operator.ge, operator.eq))
    minimum, maximum = staticmethod(min), staticmethod(max)

    @staticmethod
    def constant(value: int, dtype: torch.dtype) -> int:
        return value

    @staticmethod
    def index_expr(value: Any, dtype: torch.dtype) -> int:
        return int(value)

    @staticmethod
    def where(holds: bool, one: int, other: int) -> int:
        return one if holds else other

    @staticmethod
    def truncdiv(a: int, b: int) -> int:
        return abs(a) // b * (1 if a >= 0 else -1)

    @staticmethod
    def mod(a: int, b: int) -> int:
        return abs(a) % b * (1 if a >= 0 else -1)

    @staticmethod
    def indirect_indexing(value: int, size: int, check: bool) -> int:
        assert 0 <= value < size
        return value


def sides(side: Callable[..., Any]) -> Iterator[Any]:
    for size, kernel, stride, dilation in product(
        range(1, 10), range(1, 6), range(1, 5), (1, 2, 3)
    ):
        for padding, ceil in product(range(kernel // 2 + 1), (False, True)):
            if (kernel - 1) * dilation + 1 <= size + 2 * padding:
                given = kernel, stride, padding, dilation
                windows = max_pool1d(torch.zeros(1, 1, size), *given, ceil_mode=ceil).shape[-1]
                yield side(size, windows, *given)


def test_all_windows_over_a_row_are_found_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = import_module("belady.graph.windows")
    monkeypatch.setattr(windows.virtualized, "ops", Numbers())
    some = [*sides(windows._Side)]
    assert len(some) > 1000
    for side, row in ((it, row) for it in some for row in range(it.size)):
        # What does not lie over the row has a place that none has, in no column.
        found = [it for it in side.covering(row) if it[1] > -1000]
        wanted = [
            (window, place)
            for window, place in product(range(side.windows), range(side.kernel))
            if side.at(window, place) == row
        ]
        assert found == wanted, (side, row)
