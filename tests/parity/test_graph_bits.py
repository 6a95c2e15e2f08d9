"""Gradients of captured graphs that can have other bits are said to, and `exact=True` has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import belady
from belady.errors import GraphError
from belady.ir.run import Run
from belady.ir.trace import Source
from belady.virtual import VirtualMemory
from tests.support.training import repeatable

ROOM = 1 << 30
WIDTH = 33
ITERATIONS = 4

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

Loss = Callable[[nn.Module, Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


class Tied(nn.Module):
    """Calls its one layer so often in each part; between parts a graph breaks."""

    def __init__(self, *parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.parts[0]):
            x = torch.tanh(self.layer(x))
        if len(self.parts) == 1:
            return x
        torch._dynamo.graph_break()
        for _ in range(self.parts[1]):
            x = torch.tanh(self.layer(x))
        return x


class Skipping(Tied):
    """What the first part gives is used twice in the second, and once more after it."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.layer(x)
        torch._dynamo.graph_break()
        second = first.sin() + first * first.cos()
        torch._dynamo.graph_break()
        return second.exp() + first


class Two(Tied):
    """Gives two results, the second of which has a layer of its own."""

    def __init__(self) -> None:
        super().__init__(1)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x)
        return x, self.other(x)


class Apart(Tied):
    """Gives two results, a view among them, that have no parameter in common."""

    def __init__(self) -> None:
        super().__init__(1)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(super().forward(x)), self.other(x).view(-1)


class Passing(Apart):
    """The graph breaks before its results are complete."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = super().forward(x)
        torch._dynamo.graph_break()
        return one.sin(), two.cos()


class Handing(Apart):
    """Its results go through one function of the user's."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = super().forward(x)
        handed: tuple[Tensor, Tensor] = Hand.apply(one, two)
        return handed


class Hand(torch.autograd.Function):
    """Gives on two tensors and their gradients."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        return one.clone(), two.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients


def first(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)[0]
    return result.square().sum()


def second(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)[1]
    return result.square().sum()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def penalized(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x) + model.layer.weight.cos().sum()


def both(model: nn.Module, x: Tensor) -> Tensor:
    first, second = model(x)
    return first.square().sum() + second.sum()


def gradients(model: nn.Module, loss: Loss) -> list[list[Tensor | None]]:
    """Of some iterations, each from the same parameters."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(ITERATIONS):
        loss(model, torch.randn(17, WIDTH, generator=generator)).backward()
        found.append([it.grad for it in model.parameters()])
        model.zero_grad()
    return found


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def alike(found: list[list[Tensor | None]], make: Callable[[], nn.Module], loss: Loss) -> bool:
    """Whether gradients are plain PyTorch's in every bit."""
    pairs = [
        pair
        for mine, plain in zip(found, gradients(made(make), loss), strict=True)
        for pair in zip(mine, plain, strict=True)
    ]
    return all(a is b or (a is not None and b is not None and a.equal(b)) for a, b in pairs)


def within(model: nn.Module, engine: str = "graph", *, exact: bool = False) -> VirtualMemory:
    return belady.virtualize(model, ROOM, policy="floor", engine=engine, exact=exact)


def trained(make: Callable[[], nn.Module], loss: Loss) -> tuple[bool, Run]:
    model = made(make)
    with within(model) as vm:
        found = gradients(model, loss)
        run = vm.run()
    assert run is not None
    assert run.trace.source is Source.GRAPH
    return alike(found, make, loss), run


SUMMED = [
    pytest.param(lambda: Tied(2, 2), squares, id="two parts"),
    pytest.param(lambda: Tied(2, 1), squares, id="one part sums, and comes last"),
    pytest.param(lambda: Tied(2), penalized, id="a penalty"),
    pytest.param(lambda: Skipping(), squares, id="a result between parts"),
]


@pytest.mark.parametrize(("make", "loss"), SUMMED)
def test_a_sum_in_another_order_is_said(make: Callable[[], nn.Module], loss: Loss) -> None:
    same, run = trained(make, loss)
    assert not same
    assert run.plan.numerics == ("gradient sums",)
    assert "the order of the sum is not plain PyTorch's" in run.notes[0]


@pytest.mark.parametrize(
    ("parts", "loss"),
    [((4,), squares), ((1, 1), squares), ((1,), penalized)],
    ids=["one graph", "two in all", "two in all, one of them outside"],
)
def test_a_sum_in_the_same_order_is_not(parts: tuple[int, ...], loss: Loss) -> None:
    same, run = trained(lambda: Tied(*parts), loss)
    assert same
    assert run.plan.numerics == ()


def test_the_report_says_what_can_change_a_bit() -> None:
    model = made(lambda: Tied(2, 2))
    with within(model) as vm:
        gradients(model, squares)
        assert "Can change a bit of the result: gradient sums" in vm.report()


def test_exact_runs_parts_that_sum_as_plain_pytorch() -> None:
    make = lambda: Tied(2, 2)  # noqa: E731
    model = made(make)
    with within(model, exact=True) as vm:
        assert alike(gradients(model, squares), make, squares)
        assert "exact=True forbids" in vm.report()


def test_exact_and_auto_take_the_eager_engine_for_parts() -> None:
    make = lambda: Tied(2, 2)  # noqa: E731
    model = made(make)
    with within(model, "auto", exact=True) as vm:
        assert alike(gradients(model, squares), make, squares)
        run = vm.run()
    assert run is not None
    assert run.trace.source is Source.EAGER


def test_exact_manages_what_is_captured_as_a_whole() -> None:
    make = lambda: Tied(4)  # noqa: E731
    model = made(make)
    with within(model, exact=True) as vm:
        assert alike(gradients(model, squares), make, squares)
        run = vm.run()
    assert run is not None
    assert run.trace.source is Source.GRAPH


def test_exact_refuses_another_gradient_before_it_is_there() -> None:
    model = made(lambda: Tied(2))
    with within(model, exact=True):
        with pytest.raises(GraphError, match="exact=True forbids that: use engine='eager'"):
            penalized(model, torch.ones(2, WIDTH)).backward()
        assert model.layer.weight.grad is None
        squares(model, torch.ones(2, WIDTH)).backward()
    assert not model.layer.weight._backward_hooks


def test_hooks_of_the_user_are_no_other_gradient() -> None:
    model = made(lambda: Tied(2))
    model.layer.weight.register_hook(lambda gradient: gradient * 2)
    with within(model, exact=True):
        squares(model, torch.ones(2, WIDTH)).backward()
    assert model.layer.weight.grad is not None


def test_no_hook_is_left_of_a_backward_that_was_cut_short() -> None:
    model = made(lambda: Tied(2))
    with within(model, exact=True):
        x = torch.ones(2, WIDTH, requires_grad=True)
        x.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            squares(model, x).backward()
    assert not model.layer.weight._backward_hooks


def test_a_backward_that_asked_for_less_is_no_other_gradient() -> None:
    model, x = made(lambda: Tied(2)), torch.ones(2, WIDTH, requires_grad=True)
    with within(model, exact=True):
        loss = squares(model, x)
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
    assert not model.layer.weight._backward_hooks


def test_results_that_are_not_used_are_said() -> None:
    same, run = trained(Two, first)
    assert same
    assert run.plan.numerics == ("unused results",)
    assert "where plain PyTorch adds none" in run.notes[0]


def test_results_that_are_used_are_not() -> None:
    same, run = trained(Two, both)
    assert same
    assert run.plan.numerics == ()


@pytest.mark.parametrize("loss", [first, second])
@pytest.mark.parametrize("make", [Apart, Passing], ids=["one graph", "two graphs"])
def test_what_leads_to_unused_results_alone_gets_none(
    make: Callable[[], nn.Module], loss: Loss
) -> None:
    same, run = trained(make, loss)
    assert same
    assert run.plan.numerics == ()
    model = made(make)
    with within(model, exact=True):
        assert alike(gradients(model, loss), make, loss)


def test_another_backward_of_one_forward_may_use_other_results() -> None:
    def grads(model: nn.Module) -> list[list[Tensor | None]]:
        results, found = model(torch.ones(2, WIDTH)), []
        for result in results:
            result.sum().backward(retain_graph=True)
            found.append([it.grad for it in model.parameters()])
            model.zero_grad()
        return found

    model = made(Apart)
    with within(model):
        found = grads(model)
    assert [[it is None for it in of] for of in found] == [
        [it is None for it in of] for of in grads(made(Apart))
    ]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_function_that_sees_to_gradients_itself_gets_zeros_as_in_plain_pytorch() -> None:
    same, run = trained(Handing, first)
    assert same
    assert run.plan.numerics == ("unused results",)


def test_exact_refuses_results_that_are_not_used() -> None:
    model = made(Two)
    with (
        within(model, exact=True),
        pytest.raises(GraphError, match="results that the loss does not use"),
    ):
        model(torch.ones(2, WIDTH))[0].sum().backward()
    assert all(it.grad is None for it in model.parameters())


@pytest.mark.filterwarnings("ignore:Using backward. with create_graph=True")
def test_a_gradient_of_a_gradient_is_refused_where_it_is_asked_for() -> None:
    model, x = made(lambda: Tied(2)), torch.ones(2, WIDTH, requires_grad=True)
    with within(model):
        (first,) = torch.autograd.grad(squares(model, x), x, create_graph=True)
        with pytest.raises(GraphError, match=r"create_graph=True .* needs engine='eager'"):
            first.square().sum().backward()


class Deep(nn.Module):
    """Has two layers, and perhaps a graph break between them."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.tanh(self.last(x))


@pytest.mark.parametrize("breaks", [True, False])
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("of", ["input", "first", "last"])
def test_so_it_is_where_one_input_alone_is_asked_for(of: str, leaf: bool, breaks: bool) -> None:
    """Its gradient would be missing, or zeros, as if the model were linear."""
    model, x = made(lambda: Deep(breaks)), torch.ones(2, WIDTH, requires_grad=True)
    given = x if leaf else torch.tanh(x)
    weights = [*model.parameters()]
    by = {"input": x, "first": weights[0], "last": weights[-1]}[of]
    with within(model):
        # What backward is given does not depend on the input.
        (first,) = torch.autograd.grad(model(given).sum(), x, create_graph=True)
        with pytest.raises(GraphError, match=r"create_graph=True .* needs engine='eager'"):
            torch.autograd.grad(first.sum(), by, materialize_grads=True)


def test_gradients_that_could_have_a_graph_need_not_be_used_so() -> None:
    model, x = made(lambda: Tied(2)), torch.ones(2, WIDTH, requires_grad=True)
    (plain,) = torch.autograd.grad(squares(model, x), x)
    with within(model):
        (found,) = torch.autograd.grad(squares(model, x), x, create_graph=True)
    assert found.equal(plain)


class Normed(nn.Module):
    """Ends in a norm over what it was told."""

    def __init__(self, norm: nn.Module, rows: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = norm
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        return self.norm(x[:, None] + torch.linspace(0, 1, self.rows)[:, None])


def over_batch() -> nn.Module:
    return Normed(nn.BatchNorm1d(5))


def over_features() -> nn.Module:
    return Normed(nn.RMSNorm(WIDTH))


def expanded(model: nn.Module, x: Tensor) -> Tensor:
    """What a sum gives is one number, shown everywhere."""
    return model(x.repeat(40, 1)).sum()


def transposed(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x.repeat(40, 1)).transpose(0, 2)
    return (y.contiguous() * torch.linspace(0.1, 3, y.numel()).reshape(y.shape)).sum()


def first_of_all(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x.repeat(40, 1)).transpose(0, 1)
    return (y.contiguous() * torch.linspace(0.1, 3, y.numel()).reshape(y.shape)).sum()


def in_its_order(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x.repeat(40, 1))
    return (y * torch.linspace(0.1, 3, y.numel()).reshape(y.shape)).sum()


LYING = [(over_batch, expanded), (over_batch, transposed), (over_features, transposed)]


@pytest.mark.parametrize(("make", "loss"), LYING)
def test_a_gradient_that_lies_otherwise_is_said_before_a_norm(
    make: Callable[[], nn.Module], loss: Loss
) -> None:
    same, run = trained(make, loss)
    assert not same
    assert run.plan.numerics == ("gradient layouts",)
    assert "does not lie in memory as its result does" in run.notes[0]
    model = made(make)
    with within(model, exact=True):
        total = loss(model, torch.ones(2, WIDTH))
        with pytest.raises(GraphError, match="does not lie in memory"):
            total.backward()


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (over_batch, in_its_order),
        (over_features, in_its_order),
        (lambda: Normed(nn.LayerNorm(WIDTH)), transposed),
        (lambda: Normed(nn.Linear(WIDTH, WIDTH)), transposed),
        (lambda: Tied(1), expanded),
        (over_features, expanded),
        (lambda: Normed(nn.RMSNorm(WIDTH), 1), first_of_all),
    ],
    ids=[
        "over the batch",
        "over features",
        "a layer norm",
        "a product",
        "an activation",
        "ones",
        "a dimension of one",
    ],
)
def test_a_gradient_before_anything_else_may_lie_as_it_does(
    make: Callable[[], nn.Module], loss: Loss
) -> None:
    same, run = trained(make, loss)
    assert same
    assert run.plan.numerics == ()


class Checkpointed(nn.Module):
    """A block that is checkpointed, with a norm or without."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return given


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_a_batch_norm_in_a_checkpoint_is_said(norm: type[nn.Module]) -> None:
    model = Checkpointed(norm(WIDTH))
    with within(model) as vm:
        for _ in range(4):
            model(torch.randn(4, WIDTH)).sum().backward()
        run = vm.run()
    assert run is not None
    assert ("checkpointed norms" in run.plan.numerics) is (norm is nn.BatchNorm1d)


def test_with_exact_bits_it_is_left_to_hooks() -> None:
    model = Checkpointed(nn.BatchNorm1d(WIDTH))
    with (
        pytest.raises(BackendCompilerFailed, match="updated once, and not twice"),
        within(model, exact=True),
    ):
        model(torch.randn(4, WIDTH))
    torch._dynamo.reset()
    with belady.virtualize(model, ROOM, engine="auto", exact=True):
        for _ in range(4):
            model(torch.randn(4, WIDTH)).sum().backward()
    assert model.block[1].num_batches_tracked == 2 * 4


class Judging(nn.Module):
    """Gives what it thinks, and how bad that is, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        given = torch.tanh(self.layer(x))
        return given, given.square().mean()


def test_auto_leaves_results_that_a_loss_may_not_use_to_hooks() -> None:
    """With exact bits an error would come in the first backward otherwise."""
    model = Judging()
    with belady.virtualize(model, ROOM, engine="auto", exact=True) as vm:
        for _ in range(6):
            model(torch.randn(4, WIDTH))[1].backward()
        run = vm.run()
    assert run is not None
    assert run.trace.source is Source.EAGER


@pytest.mark.parametrize("exact", [True, False])
def test_it_captures_a_model_with_one_result(exact: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    with belady.virtualize(model, ROOM, engine="auto", exact=exact) as vm:
        for _ in range(4):
            model(torch.randn(4, WIDTH)).sum().backward()
        run = vm.run()
    assert run is not None
    assert run.trace.source is Source.GRAPH
