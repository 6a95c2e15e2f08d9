"""What a plan leaves alone is saved by autograd itself; nothing that it waits for is."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from time import sleep
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack

import belady
from belady.eager import kinds
from belady.eager.following import Follower, following
from belady.eager.following import Step as Known
from belady.eager.hooks import outer_pair
from belady.eager.iteration import Iteration
from belady.eager.planned import Planned
from belady.eager.table import Entry, actions, tables
from belady.ir.plan import Assignment, Budget, Plan, Recompute
from belady.ir.replay import COMPARED_ONE_IN, sources
from belady.ir.trace import Trace
from belady.measure import verification
from belady.measure.calls import Call
from belady.measure.monitor import Sample
from belady.planners.replays import cheapest
from tests.parity.racing import (
    ROOM,
    Observed,
    engine_on,
    every_replay,
    hostile_carrier,
    observed,
    random_plan,
    replaying,
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


def of_any_model(call: Call) -> Call:
    """The call without numbers if a parameter is among them: it is one of the models watched."""
    known = call.alike
    if known is None or any(isinstance(it, weakref.ref) for it in known):
        return call._replace(numbers=None, alike=None)
    return call


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
    calls = [[of_any_model(call) for call in calls] for calls in seen.recipes.calls]
    recipes = replace(seen.recipes_for(training), calls=calls)
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
        follower = following(plan, seen.recipes, table, due)
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
        plan, seen.recipes, tables(seen.trace, plan, set()), actions(seen.trace, plan)
    )
    assert follower is not None
    found: dict[str, list[Known]] = {}
    for known in follower._passes[0]:
        found.setdefault(getattr(known.call.func, "__name__", ""), []).append(known)
    return found


class Attending(nn.Module):
    """Saves another number of tensors with dropout than without."""

    changing = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 4 * 16 * 16), nn.Linear(4 * 16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x)).view(-1, 4, 16, 16)
        q, k, v = (it.sigmoid() for it in (hidden.sigmoid(), hidden.tanh(), hidden.sin()))
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.changing)
        found = torch.tanh(torch.sigmoid(torch.exp(found) * v)).sigmoid().tanh()
        return self.last(found.flatten(1))


class Laying(nn.Module):
    """Makes bytes of its own that lie in another way."""

    changing = torch.contiguous_format

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(512, 512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden, x = self.first(x).view(8, 8, 8, 8), x.view(8, 8, 8, 8)
        laid = torch.sigmoid(x.transpose(1, 2)).clone(memory_format=self.changing)
        other = hidden.diagonal(dim1=1, dim2=2) * laid.diagonal(dim1=1, dim2=2)
        wave = hidden.sin()
        again = torch.sigmoid(torch.add(wave, laid))
        return self.last((again + wave.cos()).flatten(1)) + other.mean()


class Turning(Laying):
    """Turns a tensor in place, which writes no byte."""

    changing = (1, 2)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        hidden, x = self.first(x).view(8, 8, 8, 8), x.view(8, 8, 8, 8)
        laid = torch.sigmoid(x)
        turned = laid.detach()
        turned.transpose_(*self.changing)
        wave = hidden.sin()
        again = torch.sigmoid(torch.add(wave, turned))
        return self.last((again + wave.cos()).flatten(1)) + (wave * laid).mean()


class Growing(nn.Module):
    """Pads by a number: all that comes after it grows."""

    changing = 1

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(4, 10)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.pad(self.first(x).sigmoid().tanh()[:, None], (0, self.changing), value=0.1)
        return self.last(self.conv(hidden).exp().sin().mean(2))


def vectors(width: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def rows(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, 10, (size,), generator=generator)
        return torch.randn(size, width, generator=generator), labels

    return rows


# A task, what is given to the call that changes, and an op that is made again, if not all are.
CHANGES: dict[str, tuple[Task, Any, str]] = {
    "saves": (Task("attending", lambda: [Attending()], vectors(32)), 0.3, ""),
    "layout": (Task("laying", lambda: [Laying()], vectors(512)), torch.preserve_format, "add"),
    "turned": (Task("turning", lambda: [Turning()], vectors(512)), (2, 3), "add"),
    "size": (Task("growing", lambda: [Growing()], vectors(64)), 400, "tanh"),
}


def all_replays(seen: Observed, op: str) -> Plan:
    """Makes again what can be, by replays with ``op`` in them."""
    made = tuple(Assignment(value, it) for value, it in every_replay(seen.trace, op).items())
    assert made
    return Plan(seen.trace.fingerprint, "all/1", Budget(ROOM), made)


@pytest.mark.parametrize("name", CHANGES)
def test_a_number_that_changes_in_what_is_kept_changes_no_bit(name: str) -> None:
    task, changed, op = CHANGES[name]

    def step(training: Training, index: int) -> list[Tensor]:
        training.model.changing = changed
        return plain(training, index)

    seen, training = seen_of(task, plain), Training(task)
    with counting(seen, all_replays(seen, op), training) as engine:
        training.run(step, range(1))
    assert engine.calls is not None
    assert engine.calls.strayed
    assert engine.missed > 0
    assert differences(Training(task).run(step, range(1)).outcome(), training.outcome()) == []


def test_now_and_then_every_save_is_looked_at() -> None:
    seen, training, packed = seen_of(CHAIN, plain), Training(CHAIN), []
    with counting(seen, replays(seen, 3), training) as engine:
        every = len(engine._tables[0])
    for _ in range(2 * COMPARED_ONE_IN):
        engine.packed = 0
        with engine_on(training, engine):
            training.run(plain, range(1))
        packed.append(engine.packed)
    assert packed.count(every) == 2
    assert len(set(packed)) == 2
    engine.missed = 1  # in the last iteration
    engine.packed = 0
    with engine_on(training, engine):
        training.run(plain, range(1))
    assert engine.packed == every


class Slow(Planned):
    """Takes a millisecond for each save."""

    packs = 0

    def pack(self, tensor: Tensor) -> Any:
        Slow.packs += 1
        sleep(SLOW)
        return super().pack(tensor)

    def _make(self, tensor: Tensor, entry: Entry) -> Any:
        # The engine's own, and counted as such.
        sleep(8 * SLOW)
        return super()._make(tensor, entry)


SLOW = 2e-3


@pytest.mark.parametrize(
    ("trusts", "around", "looks", "apart"),
    [
        (True, False, 8, True),
        (True, False, 1, False),
        (False, False, 8, False),
        (True, True, 8, False),
    ],
    ids=["followed", "looked at", "not followed", "below hooks of the user's"],
)
def test_hooks_are_timed_apart_where_they_are_off_otherwise(
    monkeypatch: pytest.MonkeyPatch, trusts: bool, around: bool, looks: int, apart: bool
) -> None:
    """While a plan is verified, and only if its calls are followed, so that hooks can be off."""
    found: list[tuple[Sample, int, bool]] = []
    finish = Iteration.finish

    def finished(self: Iteration) -> tuple[Sample, Trace | None]:
        sample, trace = finish(self)
        found.append((sample, Slow.packs, self.observation is not None))
        Slow.packs = 0
        return sample, trace

    monkeypatch.setattr("belady.eager.following.COMPARED_ONE_IN", looks)
    monkeypatch.setattr(Iteration, "finish", finished)
    if trusts:
        monkeypatch.setattr(verification, "make_plan", replaying)
    monkeypatch.setattr(kinds, "Planned", Slow)
    training = Training(CHAIN)
    outer = hooks(lambda it: it) if around else nullcontext()
    policy = "hybrid" if trusts else "floor"
    with outer, belady.virtualize(training.models, "1GiB", policy=policy):
        training.run(plain, range(12))
    steady, packs, _ = found[-1]
    assert (steady.hook_seconds, packs > 0) == (0, True)
    counted = [it for it in found if it[0].hook_seconds]
    assert bool(counted) == apart
    for sample, packs, watched in counted:
        assert not watched
        assert sample.hook_seconds >= SLOW * packs > 0
        # The program's own part is known without what the engine takes.
        assert sample.host_seconds > 0
    # And without hooks, if nothing else disturbs the host all the time.
    assert all(SLOW * packs > min(it[0].host_seconds for it in counted) for _, packs, _ in counted)
