"""Where maxima of pooling were, counted within windows."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config

import belady
from belady.graph import capture, pools
from belady.ir.trace import Trace
from tests.parity.racing import random_plan
from tests.unit.graph.test_channels import trained

SIDE, CHANNELS, BATCH = 11, 4, 3
# Code is written anew each time, and what C++ compilers make of the same code is kept, by torch,
# for the next run too. No workers are left behind that compile.
AFRESH = {"compile_threads": 1, "fx_graph_cache": False}
ATEN = torch.ops.aten
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ASKED: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 1, "padding": 1},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    {"kernel_size": (2, 3), "stride": (3, 1), "padding": (1, 0), "dilation": (1, 2)},
    {"kernel_size": 2, "dilation": 3},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 3, "stride": 9},
    {"kernel_size": (5, 3), "stride": 2, "padding": (2, 1), "ceil_mode": True},
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Joint graphs whose maxima are counted so."""
    found: list[fx.GraphModule] = []

    def count(joint: fx.GraphModule) -> None:
        pools.count_in_windows(joint)
        if joint.graph.find_nodes(op="call_function", target=pools.MAX_POOL):
            found.append(joint)

    monkeypatch.setattr(capture, "count_in_windows", count)
    return found


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor asks of places in windows before it vectorizes: sums, in most of a minute."""
    simplify = sympy.simplify

    def simplified(asked: sympy.Expr, *given: Any, **named: Any) -> sympy.Expr:
        # Of whole multiples expanding them gives the same.
        whole = asked.is_polynomial() and not (given or named)
        return asked.expand() if whole else simplify(asked, *given, **named)

    monkeypatch.setattr(sympy, "simplify", simplified)


def pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else [*value]


def numbers_of(asked: dict[str, Any]) -> tuple[list[int], list[int], list[int], list[int], bool]:
    kernel = pair(asked["kernel_size"])
    stride, padding = pair(asked.get("stride", kernel)), pair(asked.get("padding", 0))
    return kernel, stride, padding, pair(asked.get("dilation", 1)), asked.get("ceil_mode", False)


def images(device: str, *, last: bool) -> Tensor:
    """With values that are alike, least ones wherever a window lies, and some that are none."""
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (BATCH, CHANNELS, SIDE, SIDE), device=device).float()
    x[0], x[1, 0, ::3, ::4], x[2, 1, :, :5] = -torch.inf, torch.nan, torch.inf
    return x.to(memory_format=torch.channels_last) if last else x


def backward_of(grad: Tensor, x: Tensor, numbers: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Maxima, where they were, and the gradient, by torch."""
    maxima, index = ATEN.max_pool2d_with_indices.default(x, *numbers)
    return maxima, index, ATEN.max_pool2d_with_indices_backward.default(grad, x, *numbers, index)


def same(one: Tensor, other: Tensor) -> bool:
    return one.stride() == other.stride() and torch.equal(one.nan_to_num(9), other.nan_to_num(9))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_maxima_and_gradients_have_the_bits_of_torch(
    asked: dict[str, Any], last: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, x = numbers_of(asked), images(device, last=last)
    grad = torch.randn_like(ATEN.max_pool2d_with_indices.default(x, *numbers)[0])
    expected, _, wanted = backward_of(grad, x, numbers)
    # A sample at a time, and all at once.
    for piece in (1, 1 << 20):
        monkeypatch.setattr(pools, "_PIECE", piece)
        maxima, place = pools.MAX_POOL(x, *numbers)
        assert place.dtype is torch.int8
        assert place.stride() == maxima.stride()
        assert same(maxima, expected)
        assert same(pools.MAX_POOL_BACKWARD(grad, place, *numbers, [SIDE, SIDE], last), wanted)


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True])
def test_compiled_maxima_and_gradients_have_the_bits_of_torch(last: bool, device: str) -> None:
    if not shutil.which("g++"):
        pytest.skip("Inductor needs a C++ compiler")
    import_module("belady.graph.windows")  # tells Inductor how
    x, given = images(device, last=last), [numbers_of(asked) for asked in ASKED]
    grads = [torch.randn_like(ATEN.max_pool2d_with_indices.default(x, *it)[0]) for it in given]

    def both(x: Tensor, grads: list[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for grad, numbers in zip(grads, given, strict=True):
            maxima, place = pools.MAX_POOL(x, *numbers)
            again = pools.MAX_POOL_BACKWARD(grad, place, *numbers, [SIDE, SIDE], last)
            found += [maxima, place, again]
        return found

    with config.patch(AFRESH):
        found = torch.compile(both, fullgraph=True)(x, grads)
    for at, (grad, numbers) in enumerate(zip(grads, given, strict=True)):
        maxima, place, again = found[3 * at : 3 * at + 3]
        # Where all of a window is least torch has two answers on a GPU, by how channels lie.
        expected, _, wanted = backward_of(grad.contiguous(), x.contiguous(), numbers)
        as_x = torch.channels_last if last else torch.contiguous_format
        assert place.dtype is torch.int8
        assert same(maxima, expected.to(memory_format=as_x))
        assert same(again, wanted.to(memory_format=as_x))


class Pooled(nn.Module):
    """Pools windows apart and windows that overlap, one result of which is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, CHANNELS, 3), nn.Conv2d(CHANNELS, CHANNELS, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(self.first(x), 3, stride=1, padding=1)
        y = F.max_pool2d(self.second(y) + y[:, :, 1:-1, 1:-1], 2)
        return y.flatten(1).sin()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_plain(
    seed: int, last: bool, device: str, counted: list[fx.GraphModule]
) -> None:
    torch.manual_seed(seed)
    layout = torch.channels_last if last else torch.contiguous_format
    model = Pooled().double().to(device, memory_format=layout)  # type: ignore[call-overload]
    x = torch.randn(BATCH, 3, SIDE, SIDE, dtype=torch.float64, device=device)
    x = x.to(memory_format=layout)
    expected, traces = trained(copy.deepcopy(model), None, x), list[Trace]()

    def choose(trace: Trace) -> Any:
        traces.append(trace)
        return random_plan(trace, "cuda" if device == "cuda" else "threads", seed)

    found = trained(model, choose, x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    (joint,) = counted
    # A byte for each maximum crosses from forward to backward, not eight.
    readers = joint.graph.find_nodes(op="call_function", target=pools.MAX_POOL_BACKWARD)
    assert [reader.args[1].meta["val"].dtype for reader in readers] == [torch.int8] * 2
    names = {op.name for op in traces[0].ops}
    assert names >= pools.POOLED


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_they_give_gradients_of_plain(device: str, counted: list[fx.GraphModule]) -> None:
    if not shutil.which("g++"):
        pytest.skip("Inductor needs a C++ compiler")
    torch.manual_seed(0)
    model = Pooled().to(device)
    other, x = copy.deepcopy(model), torch.randn(BATCH, 3, SIDE, SIDE, device=device)
    with (
        config.patch(AFRESH),
        belady.virtualize(model, "1GiB", engine="inductor") as vm,
    ):
        for net in (other, *[model] * 4):
            net.zero_grad()
            net(x).square().mean().backward()
        run = vm.run()
    assert run is not None
    assert run.notes == ()
    assert counted
    mine, theirs = ([it.grad for it in net.parameters()] for net in (model, other))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


class Tokens(nn.Module):
    """Pools all of an image, whose channels lie last since they were a product's columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).view(-1, 4, 4, 8).permute(0, 3, 1, 2)
        return self.second(F.max_pool2d(y, 4).flatten(1)).sin()


def test_a_gradient_lies_as_its_image_does(counted: list[fx.GraphModule]) -> None:
    torch.manual_seed(0)
    model, x = Tokens().double(), torch.randn(3, 16, 6, dtype=torch.float64)
    expected = trained(copy.deepcopy(model), None, x)
    found = trained(model, lambda trace: random_plan(trace, "threads", 1), x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert counted


class Joined(nn.Module):
    """Pools what is joined of two, so that the gradient is read in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 2, 3), nn.Conv2d(3, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(torch.cat([self.first(x), self.second(x)], 1), 2).flatten(1).sin()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_parts_of_a_gradient_lie_on_it(layout: Any, counted: list[fx.GraphModule]) -> None:
    torch.manual_seed(0)
    model, x = Joined().double(), torch.randn(BATCH, 3, SIDE, SIDE, dtype=torch.float64)
    model, x = (it.to(memory_format=layout) for it in (model, x))
    expected = trained(copy.deepcopy(model), None, x)
    found = trained(model, lambda trace: random_plan(trace, "threads", 1), x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    (joint,) = counted
    gradients = joint.graph.find_nodes(op="call_function", target=pools.MAX_POOL_BACKWARD)
    parts = joint.graph.find_nodes(op="call_function", target=ATEN.slice.Tensor)
    assert (len(gradients), len(parts)) == (1, 2)
    lie_on = {it.meta["val"].untyped_storage()._cdata for it in (*gradients, *parts)}
    assert len(lie_on) == 1


class Single(nn.Module):
    """Of one image, not of several."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x[0].sin(), 2)


class Wide(nn.Module):
    """Of windows with many places."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x.cos(), (9, 3)).sin()


class Undone(nn.Module):
    """What somebody else reads, too."""

    def forward(self, x: Tensor) -> Tensor:
        y, index = F.max_pool2d(x.sin(), 2, return_indices=True)
        return F.max_unpool2d(y.cos(), index, 2, output_size=(SIDE, SIDE))


class Deep(nn.Module):
    """Of volumes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool3d(x.unsqueeze(2).sin(), (1, 2, 2))


@pytest.mark.parametrize("net", [Single, Wide, Undone, Deep], ids=lambda it: it.__name__.lower())
def test_what_cannot_be_counted_so_stays_as_it_was(
    net: type[nn.Module], counted: list[fx.GraphModule]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(BATCH, 3, SIDE, SIDE, dtype=torch.float64)
    expected = trained(net(), None, x)
    found = trained(net(), lambda trace: random_plan(trace, "threads", 1), x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert not counted
