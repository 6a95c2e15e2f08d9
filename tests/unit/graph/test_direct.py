"""What a graph calls in place of an operator leads to that very overload, and gives its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from belady.graph import direct
from tests.support.modes import Seeing

_aten = torch.ops.aten


def rows() -> Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def image() -> Tensor:
    return torch.linspace(-1, 1, 32).reshape(1, 2, 4, 4)


def examples() -> dict[Any, list[tuple[Any, ...]]]:
    """Arguments as graphs have them: every list written out."""
    x, ones = rows(), torch.ones(4)
    square = torch.linspace(0, 1, 16).reshape(4, 4)
    several = torch.linspace(0, 1, 18).reshape(2, 3, 3)
    kernels = torch.linspace(-1, 1, 36).reshape(2, 2, 3, 3)
    geometry = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    return {
        _aten.add.Tensor: [(x, x), (x, 1), (torch.tensor(3), 1), (x, 0.5)],
        _aten.addmm.default: [(ones, x, square)],
        _aten.bmm.default: [(several, several)],
        _aten.cat.default: [([x, x],), ([x, x], 1)],
        _aten.convolution.default: [(image(), kernels, None, *geometry)],
        _aten.detach.default: [(x,)],
        _aten.expand.default: [(ones, [3, 4])],
        _aten.max_pool2d_with_indices.default: [
            (image(), [2, 2], [2, 2]),
            (image(), [3, 3], [2, 2], [1, 1]),
            (image(), [2, 2]),
        ],
        _aten.mm.default: [(x, square)],
        _aten.mul.Tensor: [(x, x), (x, 2), (x, 0.5)],
        _aten.native_layer_norm.default: [(x, [4], ones, ones, 1e-5), (x, [4], None, None, 1e-5)],
        _aten.permute.default: [(x, [1, 0])],
        _aten.relu.default: [(x,)],
        _aten.sigmoid.default: [(x,)],
        _aten.sum.dim_IntList: [(x, [0]), (x, [0], True), (x, [])],
        _aten.t.default: [(x,)],
        _aten.tanh.default: [(x,)],
        _aten.transpose.int: [(x, 0, 1)],
        _aten.view.default: [(x, [4, 3]), (x, [12])],
    }


@pytest.mark.parametrize("overload", direct._FUNCTIONS, ids=str)
def test_a_function_leads_to_its_operator(overload: Any) -> None:
    for args in examples()[overload]:
        with torch.no_grad(), Seeing() as mode:
            found = direct.function_of(overload)(*args)
        expected = overload(*args)
        assert mode.ops == [overload]
        pairs = zip(_each(found), _each(expected), strict=True)
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


def test_what_has_none_is_called_as_an_operator() -> None:
    assert direct.function_of(_aten.exp.default) is _aten.exp.default._op
    assert direct.function_of(rows) is rows


def _each(results: Any) -> tuple[Tensor, ...]:
    return tuple(results) if isinstance(results, (list, tuple)) else (results,)
