"""A ReLU in the coordinated order, whoever reads its result and however often it goes backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from belady.ordered.relu import source_of
from belady.ordered.wrap import ordered
from tests.unit.ordered.relus import assert_equal_bits, leaf, special


def test_a_gradient_of_a_gradient_is_that_of_plain_pytorch() -> None:
    def of(relu: nn.Module) -> list[Tensor]:
        x = special((10, 10), 1).double().nan_to_num(1, 2, -2).requires_grad_()
        (first,) = torch.autograd.grad(relu(x * x).sum(), x, create_graph=True)
        first.square().sum().backward()
        assert x.grad is not None
        return [first.detach(), x.grad]

    expected = of(nn.ReLU())
    relu = nn.ReLU()
    ordered(relu)
    for one, two in zip(expected, of(relu), strict=True):
        assert_equal_bits(one, two)


def test_a_gradient_of_a_gradient_where_the_output_is_gone() -> None:
    def of(model: Read) -> Tensor:
        torch.manual_seed(1)
        x = torch.randn(2, 4, 6, 6).requires_grad_()
        y = model.relu(x * 1)
        torch.autograd.grad(model.one(y).sum(), y)
        weight = torch.ones(()).requires_grad_()
        (first,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    model = Read(READS["one"])
    expected = of(model)
    ordered(model)
    assert_equal_bits(expected, of(model))


@pytest.mark.parametrize("in_order", [False, True])
def test_a_gradient_of_a_gradient_without_the_graph_is_refused_as_ever(in_order: bool) -> None:
    relu = nn.ReLU()
    if in_order:
        ordered(relu)
    x = leaf()
    y = relu(x * x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True, retain_graph=False)
    with pytest.raises(RuntimeError, match="a second time"):
        first.square().sum().backward()


def test_a_graph_that_is_kept_takes_no_signs() -> None:
    relu = nn.ReLU()
    ordered(relu)
    y = relu(leaf())
    y.sum().backward(retain_graph=True)
    assert source_of(y).positive is None


def test_several_gradients_at_once() -> None:
    def of(relu: nn.Module) -> Tensor:
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        many = torch.arange(24.0).view(2, 3, 4)
        return torch.autograd.grad(relu(x * 1), x, many, is_grads_batched=True)[0]

    relu = nn.ReLU()
    ordered(relu)
    assert_equal_bits(of(nn.ReLU()), of(relu))


def test_going_backward_a_second_time_is_refused_as_ever() -> None:
    relu = nn.ReLU()
    ordered(relu)
    loss = relu(leaf()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_a_result_changed_before_backward_is_noticed() -> None:
    relu = nn.ReLU()
    ordered(relu)
    y = relu(leaf())
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_no_gradient_gives_none() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> None:
            return None

    def of(relu: nn.Module) -> Tensor | None:
        x = leaf()
        nothing: Tensor = Nothing.apply(relu(x * 1))
        nothing.sum().backward()
        return x.grad

    relu = nn.ReLU()
    ordered(relu)
    assert of(nn.ReLU()) is None
    assert of(relu) is None


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1)


class Read(nn.Module):
    """What several read of which the first to go backward is in order, or is not."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.relu, self.one, self.two = nn.ReLU(inplace=True), conv(), conv()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.relu(x), self.one, self.two)


READS: dict[str, Callable[..., Tensor]] = {
    "one": lambda y, one, two: one(y),
    "both": lambda y, one, two: one(y) + two(y),
    "added": lambda y, one, two: two(one(y)) + y,
    "saved by another too": lambda y, one, two: one(y) * y.exp(),
    "pooled": lambda y, one, two: F.max_pool2d(y, 2),
    "nobody": lambda y, one, two: y,
    "written elsewhere": lambda y, one, two: one(y).relu_(),
    "under a checkpoint": lambda y, one, two: checkpoint(one, y, use_reentrant=False),
    "of a view": lambda y, one, two: one(y.flatten(2).unflatten(2, (6, 6))),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_whoever_reads_the_result(name: str, cast: bool, keep: bool) -> None:
    def of(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(2, 4, 6, 6).requires_grad_()
        with torch.autocast("cpu", enabled=cast):
            loss = model(x * 1).square().sum()
        inputs = [x, *model.parameters()]
        once = torch.autograd.grad(loss, inputs, retain_graph=keep, allow_unused=True)
        again = torch.autograd.grad(loss, inputs, allow_unused=True) if keep else ()
        return [it for it in (*once, *again) if it is not None]

    torch.manual_seed(0)
    model = Read(READS[name])
    expected = of(model)
    undo = ordered(model)
    found = of(model)
    undo()
    for one, two in zip(expected, found, strict=True):
        assert_equal_bits(one, two)


def test_gradients_of_a_part_leave_the_rest_as_it_was() -> None:
    def of(model: Read) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(2, 4, 6, 6).requires_grad_()
        y = model.relu(x * 1)
        # The layer lets go of what it has read; the ReLU goes backward only later, by another way.
        (inner,) = torch.autograd.grad(model.one(y).sum(), y)
        (outer,) = torch.autograd.grad((y * 3).sum(), x)
        return [inner, outer]

    model = Read(READS["one"])
    expected = of(model)
    ordered(model)
    for one, two in zip(expected, of(model), strict=True):
        assert_equal_bits(one, two)


def test_what_is_saved_is_what_plain_pytorch_saves() -> None:
    """So that whoever moves saved tensors moves the same ones, and once."""
    seen: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(f"saved {tuple(tensor.shape)}")
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        seen.append("read")
        return tensor

    relu = nn.ReLU()
    ordered(relu)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = relu(leaf())
    y.sum().backward()
    assert seen == ["saved (4, 6)", "read"]


def test_the_last_layer_to_let_go_leaves_the_signs() -> None:
    model = Read(READS["both"])
    ordered(model)
    y = model.relu(torch.randn(2, 4, 6, 6).requires_grad_() * 1)
    one, two = model.one(y).sum(), model.two(y).sum()
    torch.autograd.grad(one, y, retain_graph=True)
    torch.autograd.grad(one, y)
    assert source_of(y).positive is None
    torch.autograd.grad(two, y)
    assert source_of(y).positive is not None
