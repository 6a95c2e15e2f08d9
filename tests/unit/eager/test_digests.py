from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import pytest
import torch

from belady.eager.digests import Digests, _Late, _Pairs
from belady.errors import ReplayError
from belady.ir.replay import COMPARED_ONE_IN

VALUES = range(3 * COMPARED_ONE_IN)


@dataclass
class Event:
    there: bool = False

    def query(self) -> bool:
        return self.there

    def synchronize(self) -> None:
        self.there = True


def pairs(*equal: bool) -> _Pairs:
    """Digests of as many values, which op 0 and so on have made."""
    found = _Pairs(None)
    for op, same in enumerate(equal):
        found.add(torch.zeros(3), torch.full((3,), float(not same)), f"op {op}")
    return found


def answering(equal: bool) -> tuple[Digests, Event]:
    """Digests in their second iteration, with one answer of it on its way."""
    digests, event = Digests(at_once=False), Event()
    digests.start_iteration()
    digests.finish_iteration()
    digests.start_iteration()
    there = cast("torch.cuda.Event", event)
    digests._late.append(_Late(2, torch.tensor(equal), there, pairs(True, equal, equal)))
    return digests, event


def test_asked_at_once_every_replay_is_compared_in_every_iteration():
    digests = Digests()
    for _ in range(4):
        digests.start_iteration()
        assert all(map(digests.compares, VALUES))


def test_else_all_are_compared_until_an_iteration_has_ended_and_then_each_in_its_turn():
    digests = Digests(at_once=False)
    for _ in range(2):
        digests.start_iteration()
        assert all(map(digests.compares, VALUES))
    digests.finish_iteration()
    turns = []
    for _ in range(COMPARED_ONE_IN):
        digests.start_iteration()
        turns.append({value for value in VALUES if digests.compares(value)})
    assert sorted(value for turn in turns for value in turn) == list(VALUES)
    assert {len(turn) for turn in turns} == {3}


def test_an_answer_that_is_not_there_is_not_waited_for_in_its_own_iteration():
    digests, event = answering(equal=False)
    digests.demand_equal()
    assert not event.there
    assert not digests.refuted


def test_an_answer_that_is_there_in_its_own_iteration_may_still_be_too_late():
    digests, event = answering(equal=False)
    event.there = True
    # An optimizer that steps inside backward has stepped some parameters.
    with pytest.raises(ReplayError, match="an optimizer may have used them"):
        digests.demand_equal()


@pytest.mark.parametrize("demand", [Digests.demand_equal, Digests.demand_known])
def test_the_next_iteration_waits_for_the_answer_and_says_that_it_is_late(
    demand: Callable[[Digests], None],
):
    digests, event = answering(equal=False)
    digests.start_iteration()
    with pytest.raises(ReplayError, match=r"known late.*state saved before"):
        demand(digests)
    assert event.there
    assert digests.refuted
    digests.start_iteration()
    demand(digests)


def test_the_first_op_that_came_out_otherwise_is_named() -> None:
    digests = Digests()
    digests._pairs[None] = pairs(True, False, False)
    with pytest.raises(ReplayError, match=r"first those of op 1: .*no optimizer has used them"):
        digests.demand_equal()
    digests, _ = answering(equal=False)
    with pytest.raises(ReplayError, match=r"first those of op 1: .*known late"):
        digests.settle()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_nobody_goes_on_with_wrong_bytes_because_it_cannot_be_told_whose_they_are(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise error("now")

    named = error is torch.OutOfMemoryError
    for late in (False, True):
        digests, _ = answering(equal=False)
        if not late:
            digests = Digests()
            digests._pairs[None] = pairs(False)
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "equal", fail)
            with pytest.raises(ReplayError if named else error, match="an op" if named else "now"):
                digests.settle() if late else digests.demand_equal()
        assert digests.refuted
        if not named:
            with pytest.raises(ReplayError):
                digests.settle() if late else digests.demand_equal()


def test_what_is_wrong_now_does_not_hide_what_was_wrong_before():
    digests, _ = answering(equal=False)
    digests.start_iteration()
    digests.refute("a parameter was changed")
    with pytest.raises(ReplayError, match="known late"):
        digests.demand_equal()


def test_a_late_answer_that_all_was_equal_is_forgotten():
    digests, _ = answering(equal=True)
    digests.start_iteration()
    digests.demand_equal()
    assert not digests.refuted
    assert digests._late == []


def test_whoever_ends_waits_for_what_is_on_its_way_and_is_told_once():
    digests, event = answering(equal=False)
    with pytest.raises(ReplayError, match="known late"):
        digests.settle()
    assert event.there
    digests.settle()
