"""The coordinated order gives the bits of plain PyTorch, whatever the layer and the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from belady.ordered import wrap
from belady.ordered.wrap import ordered

TAKEN: list[nn.Module] = []


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes down which layers went in order."""
    plain = wrap.call

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        TAKEN.append(layer)
        return plain(layer, x)

    TAKEN.clear()
    monkeypatch.setattr(wrap, "call", call)


Precision = tuple[torch.dtype, torch.dtype | None]
PRECISIONS: list[Precision] = [
    (torch.float32, None),
    (torch.float64, None),
    (torch.bfloat16, None),
    (torch.float32, torch.bfloat16),
]
KINDS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def results(
    model: nn.Module, x: Tensor, cast: torch.dtype | None, device: str = "cpu"
) -> list[Tensor | None]:
    """Output, and all gradients."""
    x = x.clone().requires_grad_()
    with torch.autocast(device, cast or torch.bfloat16, enabled=cast is not None):
        y = model(x * 1)
    weights = torch.arange(y.numel(), dtype=torch.float64, device=device).mul_(0.7).sin_()
    (y.double() * weights.view(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def assert_same(
    make: Callable[[], nn.Module], x: Tensor, precision: Precision, device: str = "cpu"
) -> int:
    """Compare bits and layouts; gives how many calls went in order."""
    dtype, cast = precision
    torch.manual_seed(0)
    model = make().to(device, dtype)
    torch.manual_seed(0)
    twin = make().to(device, dtype)
    x = x.to(device, dtype)
    expected = results(model, x, cast, device)
    undo = ordered(twin)
    TAKEN.clear()
    actual = results(twin, x, cast, device)
    undo()
    for one, two in zip(expected, actual, strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert (one.dtype, one.stride()) == (two.dtype, two.stride())
            assert torch.equal(one, two)
    return len(TAKEN)


def convolutions() -> Iterator[tuple[int, dict[str, Any]]]:
    for dimensions, groups, dilation in product((1, 2, 3), (1, 2, 4), (1, 2)):
        options = {"groups": groups, "dilation": dilation}
        yield dimensions, options | {"padding": 1, "stride": 2}
        yield dimensions, options | {"padding": "same", "bias": False}
    for mode in ("reflect", "circular", "replicate"):
        yield 2, {"padding": (1, 2), "padding_mode": mode}
    yield 2, {"padding": "valid", "stride": (1, 2)}


def reordered(make: Callable[[], nn.Module]) -> nn.Module:
    return make().to(memory_format=torch.channels_last_3d)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions(precision: Precision, channels_last: bool) -> None:
    for dimensions, options in convolutions():
        make = partial(KINDS[dimensions], 4, 8, 3, **options)
        x = numbers(3, 4, *(7,) * dimensions)
        if channels_last and dimensions == 2:
            x = x.to(memory_format=torch.channels_last)
        if channels_last and dimensions == 3:
            make = partial(reordered, make)
        assert assert_same(make, x, precision) == 1, (dimensions, options)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_linear_layers(precision: Precision) -> None:
    for shape, bias in product([(5, 7), (2, 5, 7), (2, 3, 5, 7)], [True, False]):
        make = partial(nn.Linear, 7, 11, bias=bias)
        assert assert_same(make, numbers(*shape), precision) == 1


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


def frozen(layer: nn.Module, *names: str) -> nn.Module:
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
    return layer


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda _, given, result: result + given[0].sum())
    layer.register_full_backward_hook(lambda _, inner, outer: (inner[0] * 2,))
    layer.register_full_backward_pre_hook(lambda _, outer: (outer[0] * 3,))
    return layer


def parametrized(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


def with_weight_norm_of_old(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="deprecated"):
        return nn.utils.weight_norm(layer)


def checkpointed(reentrant: bool) -> Callable[..., Tensor]:
    return lambda x, *parts: checkpoint(nn.Sequential(*parts), x, use_reentrant=reentrant)


class Mine(nn.Linear):
    pass


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1)


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "one after another": (
        lambda: nn.Sequential(conv(), nn.ReLU(inplace=True), conv(), nn.GELU()),
        3,
    ),
    "in place behind a norm": (
        lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(inplace=True), conv(), nn.ReLU()),
        4,
    ),
    "residual": (
        lambda: Calling(
            lambda x, one, two, relu: relu(two(relu(one(x))) + x), conv(), conv(), nn.ReLU(True)
        ),
        4,
    ),
    "read by two": (
        lambda: Calling(
            lambda x, one, relu, rest: rest(relu(one(x))),
            *(conv(), nn.ReLU(), Calling(lambda y, one, two: one(y) + two(y) + y, conv(), conv())),
        ),
        4,
    ),
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(True)),
        4,
    ),
    "relu of a leaf": (
        lambda: Calling(
            lambda x, one, relu: one(relu(x.detach().requires_grad_())), conv(), nn.ReLU()
        ),
        2,
    ),
    "under a checkpoint, with a relu": (
        lambda: Calling(checkpointed(False), conv(), nn.ReLU(True), conv()),
        6,
    ),
    "called twice": (lambda: Calling(lambda x, one: one(one(x)), conv()), 2),
    "saved by others too": (lambda: Calling(lambda x, one: one(x.exp()) + x.exp(), conv()), 1),
    "written into afterwards": (lambda: Calling(lambda x, one: one(x).mul_(2).relu_(), conv()), 1),
    "read and added to": (
        lambda: Calling(lambda x, one, two: one(x) + two(x) + x, conv(), conv()),
        2,
    ),
    "under a checkpoint": (lambda: Calling(checkpointed(False), conv(), conv()), 4),
    "under a checkpoint that re-enters": (lambda: Calling(checkpointed(True), conv(), conv()), 1),
    "with hooks": (lambda: hooked(conv()), 1),
    "with an old norm of weights": (lambda: with_weight_norm_of_old(conv()), 1),
    "frozen weight": (lambda: frozen(conv(), "weight"), 0),
    "frozen bias": (lambda: frozen(conv(), "bias"), 1),
    "parametrized": (lambda: parametrized(conv()), 0),
    "transposed input": (lambda: Calling(lambda x, one: one(x.mT), nn.Linear(6, 5)), 0),
    "subclass": (lambda: Mine(6, 5), 0),
    "by keyword": (lambda: Calling(lambda x, one: one(input=x), conv()), 0),
    "input of a leaf": (
        lambda: Calling(lambda x, one: one(x.detach().requires_grad_()), conv()),
        0,
    ),
    "input without gradient": (lambda: Calling(lambda x, one: one(x.detach()), conv()), 0),
    "one sample without a batch": (lambda: Calling(lambda x, one: one(x[0]), conv()), 0),
    "no samples": (
        lambda: Calling(lambda x, one: F.pad(one(x[:0]).sum((0, 2, 3)), (0, 1)), conv()),
        0,
    ),
    "uneven sides": (lambda: nn.Conv2d(4, 4, 2, padding="same"), 0),
    "no gradient wanted": (lambda: Calling(lambda x, one: torch.no_grad()(one)(x) * x, conv()), 0),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_calls(name: str, precision: Precision) -> None:
    make, in_order = CASES[name]
    assert assert_same(make, numbers(2, 4, 6, 6), precision) == in_order


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_a_gpu(precision: Precision) -> None:
    for dimensions, options in convolutions():
        make = partial(KINDS[dimensions], 4, 8, 3, **options)
        if options.get("padding_mode", "zeros") == "zeros":  # others have no exact kernel there
            x = numbers(3, 4, *(7,) * dimensions)
            assert assert_same(make, x, precision, "cuda") == 1, (dimensions, options)
    for shape, bias in product([(5, 7), (2, 5, 7), (2, 3, 5, 7)], [True, False]):
        make = partial(nn.Linear, 7, 11, bias=bias)
        assert assert_same(make, numbers(*shape), precision, "cuda") == 1
