"""What is made again is handed out as it is, and no reader can spoil it unnoticed for the next."""

from __future__ import annotations

import weakref

import pytest
import torch

from belady.eager.digests import Digests
from belady.eager.handles import PlannedAgain, is_of
from belady.eager.replay import Chain, Recomputed
from belady.errors import ReplayError, StaleValueError
from belady.measure.recipes import Operand, Recipe
from belady.memory.geometry import Geometry

INPUT, WEIGHT, MADE = range(3)


def recipe(x: torch.Tensor, weight: torch.Tensor) -> Recipe:
    operands = (Operand(INPUT, Geometry.of(x)), Operand(WEIGHT, Geometry.of(weight)))
    return Recipe(torch.ops.aten.mul.Tensor, operands, {}, (MADE,))


class Case:
    """A product that is made again from a saved value and a parameter."""

    def __init__(self, reads: int, *, once: bool = True, nbytes: int = 48) -> None:
        self.x, self.weight = torch.randn(3, 4), torch.nn.Parameter(torch.randn(3, 4))
        self.asked: list[Geometry] = []
        self.saved = (self.x * self.weight).detach()
        owned: dict[int, weakref.ref[torch.Tensor]] = {WEIGHT: weakref.ref(self.weight)}
        steps = (recipe(self.x, self.weight),)
        chain = Chain(MADE, "op 7", nbytes, once, steps, ((),), (INPUT,), owned)
        versions = {WEIGHT: self.weight._version}
        sources = {INPUT: self.source}
        self.content = Recomputed(self.saved, chain, versions, sources, Digests())
        self.content.unread = reads

    def source(self, geometry: Geometry) -> torch.Tensor:
        self.asked.append(geometry)
        return self.x

    def handle(self, tensor: torch.Tensor) -> PlannedAgain:
        return PlannedAgain(tensor, self.content, None, -1, 0)


def test_it_is_handed_out_without_another_tensor_on_it() -> None:
    case = Case(reads=2)
    handle = case.handle(case.saved)
    given = handle.take()
    assert given is case.content.here
    assert torch.equal(given, case.saved)
    assert given.untyped_storage().data_ptr() != case.saved.untyped_storage().data_ptr()
    assert not given.requires_grad


def test_it_is_laid_out_where_it_lay_otherwise() -> None:
    case = Case(reads=2)
    turned = case.handle(case.saved.t()).take()
    row = case.handle(case.saved[1]).take()
    assert torch.equal(turned, case.saved.t())
    assert torch.equal(row, case.saved[1])
    assert turned.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
    assert len(case.asked) == 1


def test_after_the_last_read_nothing_holds_it() -> None:
    case = Case(reads=1)
    given = weakref.ref(case.handle(case.saved).take())
    assert case.content.here is None
    assert given() is None


@pytest.mark.parametrize("turned", [False, True])
def test_what_a_reader_wrote_to_is_given_to_no_other(turned: bool) -> None:
    case = Case(reads=2)
    handles = [case.handle(case.saved.t() if turned else case.saved) for _ in range(2)]
    handles[0].take().add_(1.0)
    with pytest.raises(StaleValueError):
        handles[1].take()


def test_a_write_to_the_original_is_noticed() -> None:
    case = Case(reads=1)
    handle = case.handle(case.saved)
    case.saved.add_(1.0)
    with pytest.raises(StaleValueError):
        handle.take()


def test_a_write_to_a_parameter_is_noticed() -> None:
    case = Case(reads=1)
    handle = case.handle(case.saved)
    with torch.no_grad():
        case.weight.add_(1.0)
    with pytest.raises(ReplayError, match="changed in place"):
        handle.take()


def test_another_number_of_bytes_is_an_error() -> None:
    case = Case(reads=1, nbytes=44)
    with pytest.raises(ReplayError, match="44 bytes were to be made again, and 48 were, by op 7:"):
        case.handle(case.saved).take()


def test_bytes_that_are_saved_once_are_no_others() -> None:
    case = Case(reads=1, once=False)
    assert is_of(case.content, case.saved)
    assert not is_of(case.content, case.saved.clone())
    case.saved.add_(1.0)
    assert not is_of(case.content, case.saved)
    case = Case(reads=1)
    assert not is_of(case.content, case.saved)


def test_tensors_are_filled_in_wherever_they_stand() -> None:
    x, y = torch.randn(2), torch.randn(2)
    known = {INPUT: x, WEIGHT: y}
    operands = [Operand(value, Geometry.of(tensor)) for value, tensor in known.items()]
    cat = Recipe(torch.ops.aten.cat.default, (operands, 0), {}, (MADE,))
    add = Recipe(torch.ops.aten.add.Tensor, (2.0, operands[0]), {"alpha": 3}, (MADE,))
    clamp = Recipe(torch.ops.aten.clamp.Tensor, (operands[0],), {"min": operands[1]}, (MADE,))
    wanted = (torch.cat([x, y]), torch.add(2.0, x, alpha=3), torch.clamp(x, min=y))
    for case, result in zip((cat, add, clamp), wanted, strict=True):
        (made,) = case.run(lambda operand: known[operand.value])
        assert torch.equal(made, result)


def test_what_no_later_op_reads_is_gone_while_the_next_one_runs() -> None:
    """``(x * w) * w * w``: of three products there are two at once."""
    x, weight = torch.randn(3, 4), torch.nn.Parameter(torch.randn(3, 4))
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        alive.append(sum(it() is not None for it in made))
        product = a * b
        made.append(weakref.ref(product))
        return product

    def step(source: int, result: int) -> Recipe:
        operands = (Operand(source, Geometry.of(x)), Operand(WEIGHT, Geometry.of(weight)))
        return Recipe(times, operands, {}, (result,))

    first, second = 11, 12
    steps = (step(INPUT, first), step(first, second), step(second, MADE))
    spent = ((), (first,), (second,))
    chain = Chain(MADE, "op 7", 48, True, steps, spent, (INPUT,), {WEIGHT: weakref.ref(weight)})
    saved = (x * weight * weight * weight).detach()
    content = Recomputed(saved, chain, {WEIGHT: weight._version}, {INPUT: lambda _: x}, Digests())
    assert torch.equal(content.take(), saved)
    assert alive == [0, 1, 1]
