"""Optimizer state changes its place once, and the optimizer goes on with the same tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from belady.memory.lasting import Place, settle_state
from tests.support.training import differences
from tests.unit.eager.elsewhere import SQUARE, WIDTH, Elsewhere, loss_of, net, nowhere

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "adamw foreach": functools.partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "adamw for loop": functools.partial(torch.optim.AdamW, lr=1e-3, foreach=False, fused=False),
    "adamw fused": functools.partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "adamw amsgrad": functools.partial(torch.optim.AdamW, lr=1e-3, amsgrad=True),
    "sgd momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=1e-3),
}


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    leaves = tree_leaves(list(optimizer.state.values()))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    optimizer.zero_grad()
    loss_of(model, index).backward()
    optimizer.step()


def trained(make: Make, place: Place | None) -> dict[str, Tensor]:
    model = net()
    optimizer = make(model.parameters())
    for index in range(4):
        step(model, optimizer, index)
        if index == 0 and place is not None:
            settle_state(optimizer, place)
    found = {f"state {i}": tensor.clone() for i, tensor in enumerate(state_of(optimizer))}
    return found | {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_training_goes_on_with_the_same_numbers(make: Make) -> None:
    place = Elsewhere()
    assert differences(trained(make, None), trained(make, place)) == []
    assert differences(trained(make, None), trained(make, nowhere)) == []
    assert bool(place.sizes) == (make is not MAKERS["adafactor"])


def settled(make: Make) -> tuple[torch.optim.Optimizer, dict[int, int], Elsewhere]:
    """An optimizer whose state has moved, the former addresses of its tensors, the place."""
    model, place = net(), Elsewhere()
    optimizer = make(model.parameters())
    step(model, optimizer, 0)
    before = {id(tensor): tensor.data_ptr() for tensor in state_of(optimizer)}
    settle_state(optimizer, place)
    return optimizer, before, place


def test_large_tensors_move_and_stay_the_same_objects() -> None:
    optimizer, before, place = settled(MAKERS["adamw foreach"])
    after = state_of(optimizer)
    assert before.keys() == {id(tensor) for tensor in after}
    moved = [tensor for tensor in after if tensor.data_ptr() != before[id(tensor)]]
    assert [tensor.nbytes for tensor in moved] == place.sizes == [SQUARE] * 4
    # Counts of steps and what belongs to small parameters.
    assert len(after) == 5 * 3 > len(moved)


def test_values_and_strides_are_as_before() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    step(model, optimizer, 0)
    buffer = optimizer.state[model.weight]["momentum_buffer"]
    before, strides = buffer.clone(), buffer.stride()
    place = Elsewhere()
    settle_state(optimizer, place)
    assert place.sizes == [SQUARE]
    assert torch.equal(buffer, before)
    assert buffer.stride() == strides == (1, WIDTH)


def test_without_room_state_stays() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    step(model, optimizer, 0)
    before = [tensor.data_ptr() for tensor in state_of(optimizer)]
    settle_state(optimizer, nowhere)
    assert [tensor.data_ptr() for tensor in state_of(optimizer)] == before


def test_an_optimizer_without_state_has_nothing_to_move() -> None:
    place = Elsewhere()
    settle_state(torch.optim.SGD(net().parameters(), 1e-3), place)
    assert place.sizes == []


def test_a_settled_optimizer_can_be_copied_saved_and_loaded() -> None:
    optimizer, _, _ = settled(MAKERS["adamw foreach"])
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for old, new in zip(tree_leaves(saved["state"]), state_of(optimizer), strict=True):
        assert torch.equal(old, new)


class Keeping(torch.optim.Optimizer):
    """Keeps, by the first parameter, whatever it is given."""

    def __init__(self, parameter: nn.Parameter, **kept: object) -> None:
        super().__init__([parameter], {})
        self.state[parameter] = kept


def square(fill: float = 1.0) -> Tensor:
    return torch.full((WIDTH, WIDTH), fill)


def test_state_in_lists_and_dicts_moves() -> None:
    parameter, place = nn.Parameter(square()), Elsewhere()
    held = [square(), {"inner": square()}, (square(), 3, None, "text")]
    settle_state(Keeping(parameter, history=held), place)
    assert place.sizes == [SQUARE] * 3


def test_views_and_what_they_look_at_stay() -> None:
    parameter, place = nn.Parameter(square()), Elsewhere()
    flat = torch.zeros(2 * WIDTH * WIDTH)
    views = [flat[: WIDTH * WIDTH], flat[WIDTH * WIDTH :]]
    settle_state(Keeping(parameter, flat=flat, views=views), place)
    assert place.sizes == []
    views[0].fill_(3)
    assert flat.sum() == 3 * WIDTH * WIDTH


@pytest.mark.parametrize("alias", [Tensor.detach, torch.t], ids=["detached", "transposed"])
def test_state_that_shares_its_bytes_stays(alias: Callable[[Tensor], Tensor]) -> None:
    """A master copy that is the parameter itself must go on being it."""
    parameter, place = nn.Parameter(square()), Elsewhere()
    optimizer = Keeping(parameter, master=alias(parameter.detach()))
    settle_state(optimizer, place)
    assert place.sizes == []
    with torch.no_grad():
        parameter.fill_(5)
    assert (optimizer.state[parameter]["master"] == 5).all()


def test_sparse_state_and_state_that_requires_grad_stay() -> None:
    parameter, place = nn.Parameter(square()), Elsewhere()
    learned = square().requires_grad_()
    settle_state(Keeping(parameter, sparse=torch.eye(WIDTH).to_sparse(), learned=learned), place)
    assert place.sizes == []


def test_state_of_more_or_fewer_bytes_than_elements_stays() -> None:
    parameter, place = nn.Parameter(square()), Elsewhere()
    part = torch.zeros(2, WIDTH, WIDTH)[0].detach()
    constant = torch.zeros(1).expand(WIDTH, WIDTH).detach()
    settle_state(Keeping(parameter, part=part, constant=constant), place)
    assert place.sizes == []
