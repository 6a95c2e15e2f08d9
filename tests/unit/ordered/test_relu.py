"""A ReLU in the coordinated order gives the bits of plain PyTorch, whatever the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from belady.ordered.call import fits
from belady.ordered.wrap import ordered
from tests.unit.ordered.relus import assert_equal_bits, is_one, leaf, special

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


Layout = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, Layout] = {
    "as made": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "one for all": lambda x: x[:1, :1].expand(x.shape),
}


def gradients(
    relu: nn.Module, x: Tensor, gradient: Tensor, keep: bool, way: Layout
) -> Iterator[Tensor]:
    """Result, and gradient of the input, twice if the graph is kept."""
    leaf = x.clone().requires_grad_()
    y = relu(way(leaf.clone()))
    assert is_one(y) == ("forward" in vars(relu))
    result = y.detach().clone(memory_format=torch.preserve_format)
    yield result
    yield torch.autograd.grad(y, leaf, gradient, retain_graph=keep)[0]
    if keep:
        yield torch.autograd.grad(y, leaf, gradient)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("inner", LAYOUTS)
def test_every_number_and_layout(dtype: torch.dtype, keep: bool, inner: str) -> None:
    x, gradient = special((4, 5, 5, 6), 1).to(dtype), special((4, 5, 5, 6), 10).to(dtype)
    for outer in LAYOUTS.values():
        plain, twin = nn.ReLU(), nn.ReLU()
        undo = ordered(twin)
        way = LAYOUTS[inner]
        found = (gradients(relu, x, outer(gradient), keep, way) for relu in (plain, twin))
        for one, two in zip(*found, strict=True):
            assert_equal_bits(one, two)
        undo()


@pytest.mark.parametrize("layout", ["as made", "channels last"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(layout: str, dtype: torch.dtype) -> None:
    x, gradient = special((4, 5, 5, 6), 1).to(dtype), special((4, 5, 5, 6), 10).to(dtype)
    way = LAYOUTS[layout]
    plain, twin = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
    ordered(twin)
    for outer in LAYOUTS.values():
        found = (
            gradients(relu, way(x), outer(gradient), False, torch.clone) for relu in (plain, twin)
        )
        for one, two in zip(*found, strict=True):
            assert_equal_bits(one, two)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    x, gradient = special((4, 5, 5, 6), 1), special((4, 5, 5, 6), 10)
    x, gradient = x.to("cuda", dtype), gradient.to("cuda", dtype)
    plain, twin = nn.ReLU(), nn.ReLU()
    ordered(twin)
    for inner, outer in product(LAYOUTS.values(), LAYOUTS.values()):
        found = (gradients(relu, x, outer(gradient), False, inner) for relu in (plain, twin))
        for one, two in zip(*found, strict=True):
            assert_equal_bits(one.cpu(), two.cpu())


def test_in_place_means_in_place() -> None:
    relu = nn.ReLU(inplace=True)
    ordered(relu)
    x = torch.randn(4, 4).requires_grad_() * 1
    assert relu(x) is x
    assert is_one(x)


class Mine(Tensor):
    pass


LEFT: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
    "a view, in place": (nn.ReLU(True), lambda: (leaf() * 1).view(-1)),
    "gaps, in place": (nn.ReLU(True), lambda: Gaps.apply(leaf())),
    "no gradient": (nn.ReLU(), lambda: leaf().detach()),
    "integers": (nn.ReLU(), lambda: torch.arange(4)),
    "no elements": (nn.ReLU(), lambda: leaf()[:0] * 1),
    "subclass of a tensor": (nn.ReLU(), lambda: leaf().as_subclass(Mine)),
}


class Gaps(torch.autograd.Function):
    """Gives a tensor that is no view and does not lie dense."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, (3 * x.shape[1], 2)).copy_(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    relu, make = LEFT[name]
    undo = ordered(relu)
    x = make()
    assert not fits(relu, x)
    assert not is_one(relu(x))
    undo()


def test_without_gradients_it_runs_as_ever() -> None:
    relu = nn.ReLU()
    ordered(relu)
    with torch.no_grad():
        assert not relu(leaf()).requires_grad


def test_a_subclass_is_left_alone() -> None:
    class Other(nn.ReLU):
        pass

    relu = Other()
    ordered(relu)
    assert "forward" not in vars(relu)
    assert not is_one(relu(leaf()))


def test_a_leaf_in_place_is_refused_as_ever() -> None:
    relu = nn.ReLU(inplace=True)
    ordered(relu)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        relu(leaf())
