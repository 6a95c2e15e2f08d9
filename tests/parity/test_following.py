"""What a plan leaves alone is saved by autograd itself; nothing that it waits for is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack

from belady.eager.following import Follower, following
from belady.eager.following import Step as Known
from belady.eager.hooks import outer_pair
from belady.eager.planned import Planned
from belady.eager.table import Entry, actions, tables
from belady.ir.plan import Assignment, Budget, Encode, Plan, Recompute
from belady.ir.replay import sources
from belady.planners.replays import cheapest
from tests.parity.racing import (
    ROOM,
    Observed,
    engine_on,
    hostile_carrier,
    observed,
    random_plan,
)
from tests.support.models import CNN, GPT, LSTM, Task
from tests.support.training import Step, Training, accumulating, differences, plain

RELU = "aten.relu.default"


def hooks(pack: Callable[[Tensor], Tensor]) -> saved_tensors_hooks:
    return saved_tensors_hooks(pack, lambda it: it)


class Chain(nn.Module):
    """Convolutions in a row, then a view; hooks of its own inside, where it has them."""

    def __init__(self, *, hooked: bool = False) -> None:
        super().__init__()
        self.hooked, self.theirs = hooked, 0
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(8))
        self.last = nn.Linear(4 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for number, conv in enumerate(self.convs):
            with hooks(self.pack) if self.hooked and number > 5 else nullcontext():
                x = torch.relu(conv(x))
        return self.last(x.transpose(1, 2).flatten(1))

    def pack(self, tensor: Tensor) -> Tensor:
        self.theirs += 1
        return tensor * 1


def chain_of(training: Training) -> Chain:
    model = training.model
    assert isinstance(model, Chain)
    return model


def images(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (size,), generator=generator)
    return torch.randn(size, 4, 8, 8, generator=generator), labels


CHAIN = Task("chain", lambda: [Chain()], images)
HOOKED = Task("hooked", lambda: [Chain(hooked=True)], images)


@cache
def seen_of(task: Task, step: Step) -> Observed:
    return observed(task, step, "cpu")


def replays(seen: Observed, *numbers: int) -> Plan:
    """Makes the results of the given ones of all ReLUs again."""
    relus = [value for value in seen.trace.saved if name_of(seen, value) == RELU]
    chosen = [(relus[number], cheapest(seen.trace, relus[number])) for number in numbers]
    made = tuple(Assignment(value, it) for value, it in chosen if it is not None)
    assert len(made) == len(numbers)
    return Plan(seen.trace.fingerprint, "some/1", Budget(ROOM), made)


def name_of(seen: Observed, value: int) -> str:
    producer = seen.trace.values[value].producer
    return seen.trace.ops[producer].name if producer >= 0 else ""


class Counting(Planned):
    """Counts what goes by its hooks."""

    packed = unpacked = 0

    def pack(self, tensor: Tensor) -> Any:
        self.packed += 1
        return super().pack(tensor)

    def unpack(self, handle: Any) -> Tensor:
        self.unpacked += 1
        return super().unpack(handle)


@contextmanager
def counting(seen: Observed, plan: Plan, training: Training) -> Iterator[Counting]:
    carrier = hostile_carrier("direct")
    model = training.model
    tensors = (*model.parameters(), *model.buffers())
    persistent = {tensor.untyped_storage()._cdata for tensor in tensors}
    recipes = seen.recipes_for(training)
    try:
        engine = Counting(seen.trace, plan, carrier, persistent, recipes)
        with engine_on(training, engine):
            yield engine
    finally:
        carrier.close()


def test_what_a_plan_keeps_goes_by_no_hook() -> None:
    seen, expected, training = seen_of(CHAIN, plain), Training(CHAIN), Training(CHAIN)
    with counting(seen, replays(seen, 3), training) as engine:
        training.run(plain, range(1))
    saves = sum(len(value.saves) for value in seen.trace.values)
    # The fourth ReLU's call, of what it is made from and where it is read; the others' are not.
    assert 0 < engine.packed <= saves - 12
    assert 0 < engine.unpacked <= engine.packed
    assert engine.calls is not None
    assert not engine.calls.strayed
    assert engine.missed == 0
    assert differences(expected.run(plain, range(1)).outcome(), training.outcome()) == []


def test_hooks_of_the_users_around_a_call_get_nothing_that_belady_takes() -> None:
    seen, training, theirs = seen_of(CHAIN, plain), Training(CHAIN), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        theirs.append(tensor)
        return tensor

    def around(training: Training, index: int) -> list[Tensor]:
        x, y = training.batch(index)
        with hooks(pack):
            result = training.model(x)
        torch.autograd.backward(training.task.loss(result, y))
        return []

    with counting(seen, replays(seen, 3), training) as engine:
        training.run(around, range(1))
    assert theirs == []
    assert engine.packed == len(engine._tables[0])


def test_hooks_of_the_users_inside_a_call_stay_on() -> None:
    # Put on in an iteration that was observed without them.
    seen, expected, training = seen_of(CHAIN, plain), Training(HOOKED), Training(HOOKED)
    plan = replays(seen, 3)
    assert known_calls(plan)["conv2d"][6].past >= 0
    with counting(seen, plan, training) as engine:
        training.run(plain, range(1))
    assert engine.calls is not None
    assert not engine.calls.strayed
    expected.run(plain, range(1))
    assert chain_of(training).theirs == chain_of(expected).theirs > 0
    assert differences(expected.outcome(), training.outcome()) == []


def test_an_error_in_a_call_without_hooks_leaves_none_behind() -> None:
    seen, training, expected = seen_of(CHAIN, plain), Training(CHAIN), Training(CHAIN)
    conv = chain_of(training).convs[6]
    handle = conv.register_forward_pre_hook(lambda _, args: (args[0][:, :3],))
    plan = replays(seen, 3)
    with counting(seen, plan, training) as engine:
        with pytest.raises(RuntimeError, match="channels"):
            plain(training, 0)
        assert outer_pair() is None
        assert _get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]
    assert known_calls(plan)["conv2d"][6].past >= 0
    handle.remove()
    with counting(seen, plan, training) as engine:
        training.run(plain, range(1))
    assert engine.missed == 0
    assert differences(expected.run(plain, range(1)).outcome(), training.outcome()) == []


TRIED = {"cnn": (CNN, plain), "gpt": (GPT, plain), "lstm": (LSTM, plain)}
TRIED["passes"] = (CNN, accumulating)


@pytest.mark.parametrize("name", TRIED)
def test_nothing_is_late_because_hooks_were_off(name: str) -> None:
    seen, lifted = seen_of(*TRIED[name]), 0
    for seed in range(24):
        plan = random_plan(seen.trace, "direct", seed)
        found = [it for it in plan.decisions.values() if isinstance(it, Recompute)]
        starts = {value for replay in found for value in sources(seen.trace, replay)}
        table, due = tables(seen.trace, plan, starts), actions(seen.trace, plan)
        follower = following(seen.trace, plan, seen.recipes, table, due)
        if follower is None:
            continue
        off = set(saved_without_hooks(seen, follower))
        lifted += len(off)
        every, hooked = controls(table, set()), controls(table, off)
        for action in due:
            first = bisect_left(every, action.boundary)
            assert every[first:][:1] == hooked[bisect_left(hooked, action.boundary) :][:1]
        entries = (table[index][ordinal] for index, ordinal in off)
        assert all(entry is None or entry.plain for entry in entries)
    assert lifted > 0 or name == "lstm"  # one call that saves all


def saved_without_hooks(seen: Observed, follower: Follower) -> Iterator[tuple[int, int]]:
    for index, (steps, calls) in enumerate(zip(follower._passes, seen.recipes.calls, strict=True)):
        for known, call in zip(steps, calls, strict=True):
            if known.past >= 0:
                assert known.past == call.saves[1]
                yield from ((index, ordinal) for ordinal in range(*call.saves))


def controls(table: list[list[Entry | None]], off: set[tuple[int, int]]) -> list[int]:
    """Boundaries at which the engine gets control, in order."""
    found = set[int]()
    for index, entries in enumerate(table):
        for ordinal, entry in enumerate(entries):
            if entry is not None and (index, ordinal) not in off:
                found |= {entry.due, entry.read}
    return sorted(found)


def known_calls(plan: Plan) -> dict[str, list[Known]]:
    seen = seen_of(CHAIN, plain)
    follower = following(
        seen.trace, plan, seen.recipes, tables(seen.trace, plan, set()), actions(seen.trace, plan)
    )
    assert follower is not None
    found: dict[str, list[Known]] = {}
    for known in follower._passes[0]:
        found.setdefault(getattr(known.func, "__name__", ""), []).append(known)
    return found


def test_numbers_are_compared_where_a_plan_depends_on_them() -> None:
    found = known_calls(replays(seen_of(CHAIN, plain), 3))
    assert [known.call is not None for known in found["relu"]] == [at == 3 for at in range(8)]
    # How what is replayed lies may depend on any view.
    assert found["transpose"][0].call is not None
    assert found["flatten"][0].call is not None


def test_numbers_of_what_saves_an_encoded_value_are_compared() -> None:
    seen = seen_of(CHAIN, plain)
    relus = [value for value in seen.trace.saved if name_of(seen, value) == RELU]
    value = seen.trace.values[relus[2]]
    encode = Encode("sign", 1, value.first_save, value.first_read or 0)
    made = (Assignment(relus[2], encode),)
    found = known_calls(Plan(seen.trace.fingerprint, "some/1", Budget(ROOM), made))
    assert [known.call is not None for known in found["relu"]] == [at == 2 for at in range(8)]
    # The next convolution saves it too.
    assert [known.call is not None for known in found["conv2d"]] == [at == 3 for at in range(8)]
