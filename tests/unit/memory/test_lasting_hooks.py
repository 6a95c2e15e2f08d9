"""Which parameters are followed, for how long, and what is left on them."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from belady.memory import lasting
from belady.memory.lasting import Gradients
from tests.unit.eager.elsewhere import (
    ROOM,
    SQUARE,
    WIDTH,
    Elsewhere,
    Net,
    gradient,
    loss_of,
    net,
)


@pytest.fixture
def place() -> Elsewhere:
    return Elsewhere()


@pytest.fixture
def gradients(place: Elsewhere) -> Gradients:
    return Gradients(place)


def hooks_on(module: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())


def test_only_large_parameters_that_learn_have_hooks(gradients: Gradients) -> None:
    model = net()
    model.shared.requires_grad_(False)
    gradients.attach(model.parameters(), ROOM)
    assert hooks_on(model) == hooks_on(model.enter) == 1
    gradients.attach(model.parameters(), ROOM)
    assert hooks_on(model) == 1


def test_a_parameter_that_learns_later_is_followed_later(
    gradients: Gradients, place: Elsewhere
) -> None:
    model = net()
    model.enter.requires_grad_(False)
    gradients.attach(model.parameters(), ROOM)
    loss_of(model).backward()
    assert place.sizes == [SQUARE]
    model.zero_grad()
    model.enter.requires_grad_(True)
    gradients.attach(model.parameters(), ROOM)
    loss_of(model).backward()
    assert place.has(model.enter.weight.grad)
    # And the other way round: what has no gradient is left alone.
    model.zero_grad()
    model.enter.requires_grad_(False)
    gradients.attach(model.parameters(), ROOM)
    loss_of(model).backward()
    assert model.enter.weight.grad is None


def test_a_parameter_put_in_another_s_place_is_followed(
    gradients: Gradients, place: Elsewhere
) -> None:
    model = net()
    gradients.attach(model.parameters(), ROOM)
    for _ in range(3):
        # The new one may get the address of the old one.
        model.enter.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        gradients.attach(model.parameters(), ROOM)
        loss_of(model).backward()
        assert place.has(model.enter.weight.grad)


def test_a_parameter_that_left_the_model_loses_its_hook_too(gradients: Gradients) -> None:
    model = net()
    gradients.attach(model.parameters(), ROOM)
    old = model.enter.weight
    model.enter.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    gradients.attach(model.parameters(), ROOM)
    gradients.close()
    assert hooks_on(model) == 0
    assert not old._post_accumulate_grad_hooks


def test_a_parameter_of_two_roots_has_one_hook(gradients: Gradients, place: Elsewhere) -> None:
    model, other = net(), net()
    other.enter = model.enter
    gradients.attach([*model.parameters(), *other.parameters()], ROOM)
    assert hooks_on(model.enter) == 1
    (loss_of(model) + loss_of(other)).backward()
    assert place.sizes == [SQUARE] * 3


def test_a_parameter_that_is_no_leaf_has_no_gradient_to_move(gradients: Gradients) -> None:
    model, factor = net(), torch.ones(WIDTH, WIDTH, requires_grad=True)
    model.enter.weight.requires_grad_(False)
    model.enter.weight.mul_(factor)
    gradients.attach(model.parameters(), ROOM)
    loss_of(model).backward()
    assert hooks_on(model.enter) == 0


def test_what_is_the_same_as_the_time_before_is_not_looked_at_again(
    gradients: Gradients, place: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Tensor] = []
    followed = lasting._followed
    monkeypatch.setattr(lasting, "_followed", lambda p: looked.append(p) or followed(p))
    model = net()
    gradients.attach(model.parameters(), ROOM)
    assert len(looked) == len(list(model.parameters()))
    looked.clear()
    gradients.rest()
    gradients.attach(model.parameters(), ROOM)
    assert looked == []
    loss_of(model).backward()
    assert len(place.sizes) == 2
    # The same object, with other bytes.
    model.leave.weight.data = torch.zeros(3, WIDTH**2)
    gradients.attach(model.parameters(), ROOM)
    assert hooks_on(model.leave) == 1


class Marked(nn.Parameter):
    """Something that torch or a library derived from a parameter."""


def test_parameters_of_other_classes_are_left_alone(gradients: Gradients) -> None:
    model = net()
    model.enter.weight = Marked(torch.ones(WIDTH, WIDTH))
    gradients.attach(model.parameters(), ROOM)
    assert hooks_on(model.enter) == 0


# -- how much may move ---------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "moves"), [(2 * SQUARE, True), (2 * SQUARE - 1, False)])
def test_gradients_move_if_all_may(most: int, moves: bool, place: Elsewhere) -> None:
    model = net()
    assert Gradients(place).attach(model.parameters(), most) is moves
    assert hooks_on(model) == 2 * moves


def test_gradients_that_may_move_later_move_then(gradients: Gradients, place: Elsewhere) -> None:
    model = net()
    for most in (0, ROOM, 0):
        gradients.attach(model.parameters(), most)
        model.zero_grad()
        loss_of(model).backward()
        assert place.sizes == [SQUARE, SQUARE] * (most == ROOM)
        place.sizes.clear()


def test_gradients_that_grow_too_many_stay(place: Elsewhere) -> None:
    model, other = net(), net()
    gradients = Gradients(place)
    gradients.attach(model.parameters(), 2 * SQUARE)
    gradients.attach([*model.parameters(), *other.parameters()], 2 * SQUARE)
    loss_of(model).backward()
    assert place.sizes == []
    gradients.attach(model.parameters(), 2 * SQUARE)
    model.zero_grad()
    loss_of(model).backward()
    assert place.sizes == [SQUARE, SQUARE]


# -- for how long --------------------------------------------------------------------------------


def test_at_rest_gradients_stay_until_the_next_time(gradients: Gradients, place: Elsewhere) -> None:
    model = net()
    gradients.attach(model.parameters(), ROOM)
    gradients.rest()
    loss_of(model).backward()
    assert place.sizes == []
    gradients.attach(model.parameters(), ROOM)
    model.zero_grad()
    loss_of(model).backward()
    assert len(place.sizes) == 2


def test_nothing_is_left_after_close(gradients: Gradients, place: Elsewhere) -> None:
    model, heard = net(), []
    model.shared.weight.register_post_accumulate_grad_hook(heard.append)
    gradients.attach(model.parameters(), ROOM)
    gradients.close()
    gradients.close()
    loss_of(model).backward()
    assert place.sizes == []
    assert hooks_on(model) == len(heard) == 1


def test_dropped_without_close_it_moves_nothing_more(place: Elsewhere) -> None:
    model = net()
    Gradients(place).attach(model.parameters(), ROOM)
    loss_of(model).backward()
    assert place.sizes == []


def test_hooks_keep_no_parameter_alive(gradients: Gradients) -> None:
    model = net()
    gradients.attach(model.parameters(), ROOM)
    weight = weakref.ref(model.enter.weight)
    del model
    assert weight() is None


def pickled(model: Net) -> Net:
    again = pickle.loads(pickle.dumps(model))
    assert isinstance(again, Net)
    return again


def saved(model: Net) -> Net:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert isinstance(again, Net)
    return again


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved], ids=lambda d: d.__name__)
def test_a_copy_of_the_model_is_not_followed(
    duplicate: Callable[[Net], Net], gradients: Gradients, place: Elsewhere
) -> None:
    model = net()
    gradients.attach(model.parameters(), ROOM)
    loss_of(model).backward()
    twin = duplicate(model)
    assert hooks_on(twin) == 0
    twin.zero_grad()
    moved = len(place.sizes)
    loss_of(twin).backward()
    assert len(place.sizes) == moved
    grads: list[Tensor] = [gradient(p) for p in twin.parameters()]
    assert all(torch.equal(a, gradient(b)) for a, b in zip(grads, model.parameters(), strict=True))
