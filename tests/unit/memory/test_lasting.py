"""Gradients go elsewhere as autograd puts them, and nobody notices."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from belady.memory.lasting import Gradients, Place
from tests.support.training import differences
from tests.unit.eager.elsewhere import (
    HABITS,
    ROOM,
    SQUARE,
    WIDTH,
    Elsewhere,
    Habit,
    Net,
    gradient,
    loss_of,
    net,
    nowhere,
)
from tests.unit.measure.watching import Watch


@pytest.fixture
def place() -> Elsewhere:
    return Elsewhere()


def attached(place: Place, *modules: nn.Module, most: int = ROOM) -> Gradients:
    gradients = Gradients(place)
    gradients.attach((p for module in modules for p in module.parameters()), most)
    return gradients


def outcome(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found | {f"grad {n}": gradient(p).clone() for n, p in model.named_parameters()}


# -- numbers -------------------------------------------------------------------------------------


def trained(habit: Habit, place: Place | None) -> list[dict[str, Tensor]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    gradients = None if place is None else Gradients(place)
    seen = []
    for index in range(4):
        if gradients is not None:
            gradients.attach(model.parameters(), ROOM)
        habit(model, optimizer, index)
        seen.append(outcome(model))
    return seen


GRAPH = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")


@GRAPH
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_numbers_are_those_of_plain_training(habit: Habit, place: Elsewhere) -> None:
    for plain, moved in zip(trained(habit, None), trained(habit, place), strict=True):
        assert differences(plain, moved) == []
    assert place.sizes


def test_without_room_gradients_stay_and_numbers_too() -> None:
    (habit, *_) = HABITS
    for plain, stayed in zip(trained(habit, None), trained(habit, nowhere), strict=True):
        assert differences(plain, stayed) == []


# -- what moves, and when ------------------------------------------------------------------------


def test_large_gradients_move_and_small_ones_stay(place: Elsewhere) -> None:
    model = net()
    gradients = attached(place, model)
    loss_of(model).backward()
    moved = {name for name, p in model.named_parameters() if place.has(p.grad)}
    assert moved == {"enter.weight", "shared.weight"}
    # The weight that is used twice has one gradient.
    assert place.sizes == [SQUARE, SQUARE]
    gradients.close()


def test_a_gradient_that_is_added_to_is_not_moved_again(place: Elsewhere) -> None:
    model = net()
    gradients = attached(place, model)
    loss_of(model).backward()
    first = gradient(model.enter.weight)
    for index in range(3):
        gradients.attach(model.parameters(), ROOM)
        loss_of(model, index).backward()
        assert model.enter.weight.grad is first
    model.zero_grad(set_to_none=False)
    loss_of(model).backward()
    assert model.enter.weight.grad is first
    assert len(place.sizes) == 2
    # Also when nobody but the parameter has it, so that its object is made anew for each look.
    del first
    loss_of(model).backward()
    assert len(place.sizes) == 2
    model.zero_grad(set_to_none=True)
    loss_of(model).backward()
    assert len(place.sizes) == 4
    gradients.close()


def test_gradients_move_while_an_iteration_is_watched(place: Elsewhere) -> None:
    model = net()
    gradients = attached(place, model)
    watch = Watch(model)
    watch.call(model, torch.ones(2, WIDTH)).sum().backward()
    trace = watch.finish()
    assert place.has(model.enter.weight.grad)
    assert [op.name for op in trace.ops].count("aten.clone.default") >= 2
    gradients.close()


def test_gradients_move_in_a_backward_of_another_thread(place: Elsewhere) -> None:
    model = net()
    gradients = attached(place, model)
    thread = threading.Thread(target=loss_of(model).backward)
    thread.start()
    thread.join(30)
    assert place.has(model.enter.weight.grad)
    gradients.close()


@GRAPH
def test_gradients_that_require_grad_stay(place: Elsewhere) -> None:
    model = net()
    gradients = attached(place, model)
    wrt = [model.enter.weight]
    torch.autograd.backward([loss_of(model)], create_graph=True, inputs=wrt)
    assert gradient(model.enter.weight).requires_grad
    assert place.sizes == []
    model.enter.weight.grad = None  # a cycle with its graph otherwise
    gradients.close()


def test_sparse_gradients_stay(place: Elsewhere) -> None:
    table = nn.Embedding(WIDTH, WIDTH, sparse=True)
    gradients = attached(place, table)
    table(torch.tensor([1, 2])).sum().backward()
    assert gradient(table.weight).is_sparse
    assert place.sizes == []
    gradients.close()


def test_tied_weights_have_one_gradient(place: Elsewhere) -> None:
    embed, head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
    head.weight = embed.weight
    gradients = attached(place, nn.Sequential(embed, head))
    head(embed(torch.tensor([[1, 2], [3, 4]]))).sum().backward()
    assert place.sizes == [SQUARE]
    assert embed.weight.grad is head.weight.grad
    gradients.close()


# -- what somebody else has ----------------------------------------------------------------------


def test_what_a_hook_before_ours_keeps_is_still_the_gradient(place: Elsewhere) -> None:
    """Such a hook may have begun to sum it over processes."""
    model, kept = net(), []
    model.enter.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    gradients = attached(place, model)
    loss_of(model).backward()
    assert kept == [model.enter.weight.grad]
    assert kept[0] is model.enter.weight.grad
    assert place.has(model.shared.weight.grad)
    gradients.close()


@pytest.mark.parametrize("first", [True, False])
def test_hooks_before_and_after_ours_change_gradients(first: bool, place: Elsewhere) -> None:
    plain, model = net(), net()
    seen: list[Tensor] = []

    def double(p: Tensor) -> None:
        seen.append(gradient(p).clone())
        gradient(p).mul_(2)

    plain.enter.weight.register_post_accumulate_grad_hook(double)
    if first:
        model.enter.weight.register_post_accumulate_grad_hook(double)
    gradients = attached(place, model)
    if not first:
        model.enter.weight.register_post_accumulate_grad_hook(double)
    loss_of(plain).backward()
    loss_of(model).backward()
    assert torch.equal(seen[0], seen[1])
    assert differences(outcome(plain), outcome(model)) == []
    assert place.has(model.enter.weight.grad)
    gradients.close()


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_that_uses_the_gradient_up_leaves_none(first: bool, place: Elsewhere) -> None:
    model = net()
    before = model.enter.weight.detach().clone()

    @torch.no_grad()
    def step(p: Tensor) -> None:
        p -= 0.1 * gradient(p)
        p.grad = None

    if first:
        model.enter.weight.register_post_accumulate_grad_hook(step)
    gradients = attached(place, model)
    if not first:
        model.enter.weight.register_post_accumulate_grad_hook(step)
    loss_of(model).backward()
    assert model.enter.weight.grad is None
    assert not torch.equal(model.enter.weight, before)
    gradients.close()


def given(model: Net) -> Tensor:
    """Give a weight a gradient of the user's own making."""
    model.enter.weight.grad = torch.zeros(WIDTH, WIDTH)
    return gradient(model.enter.weight)


def held_itself(model: Net) -> Tensor:
    return given(model)


def held_as_a_view(model: Net) -> Tensor:
    return given(model).view(-1)


def held_detached(model: Net) -> Tensor:
    return given(model).detach()


def held_as_an_array(model: Net) -> Any:
    return given(model).numpy()


def held_as_a_bucket(model: Net) -> Tensor:
    bucket = torch.zeros(2, WIDTH, WIDTH)
    model.enter.weight.grad = bucket[0]
    return bucket


HELD = (held_itself, held_as_a_view, held_detached, held_as_an_array, held_as_a_bucket)


@pytest.mark.parametrize("hold", HELD, ids=lambda hold: hold.__name__)
def test_a_gradient_that_somebody_else_has_too_stays(hold: Any, place: Elsewhere) -> None:
    model = net()
    gradients = attached(place, model)
    other = hold(model)
    for _ in range(2):
        loss_of(model).backward()
    assert not place.has(model.enter.weight.grad)
    assert float(abs(other).sum()) == pytest.approx(float(gradient(model.enter.weight).abs().sum()))
    gradients.close()


def test_a_gradient_that_nobody_else_has_any_more_moves(place: Elsewhere) -> None:
    model = net()
    gradients = attached(place, model)
    given(model)
    loss_of(model).backward()
    assert place.has(model.enter.weight.grad)
    gradients.close()
