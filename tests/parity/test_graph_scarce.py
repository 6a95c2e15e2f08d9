"""Rehearsals and captures of packed blocks where there is little room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import belady
from belady.graph import launching, listening, points, rehearsal
from belady.graph.away import Value
from belady.graph.rehearsal import Rehearsal
from belady.measure import verification
from belady.measure.verification import Verification
from belady.memory.capturing import LackingError
from belady.memory.carrier import Carrier
from tests.parity.test_graph_launched import CNN, GPT, ITERATIONS, at_random
from tests.parity.test_graph_packed import NOTHING
from tests.support.launches import Rerun, launching_on_a_cpu
from tests.support.models import CLASSES, Task
from tests.support.models import CNN as DEEP_CNN
from tests.support.training import Training, differences, plain, repeatable

Lacks = Callable[[Rehearsal], bool]


class Showing(nn.Module):
    """Gives what it has saved, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(x.mean(1)))
        return self.second(torch.tanh(hidden)).mean(1), hidden


def _first(given: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(given[0], y)


SHOWING = replace(DEEP_CNN, name="showing", models=lambda: [Showing()], loss=_first)
# Of the points of an iteration, those at which there is no room for what else is there.
_EVERY = 5


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


def crowded(it: Rehearsal, act: Callable[..., Any], lacks: Lacks) -> Callable[..., Any]:
    """What runs out of memory at some points, at the end of an op that writes to nothing."""
    schema = getattr(act, "_schema", None)
    whole = schema is not None and not schema.is_mutable and "batch_norm" not in schema.name

    def tried(*args: Any, **kwargs: Any) -> Any:
        if it._points % _EVERY or not lacks(it) or not points.repeats(tried):
            return act(*args, **kwargs)
        if whole:
            # What it has drawn is drawn.
            act(*args, **kwargs)
        raise torch.OutOfMemoryError("no room")

    for name in ("_schema", "tags", "namespace"):
        if hasattr(act, name):
            setattr(tried, name, getattr(act, name))
    return tried


def holds_more(it: Rehearsal) -> bool:
    """Whether something is there that is not read."""
    return not {*it._here} <= {*it._read}


def train(
    task: Task, policy: str, monkeypatch: pytest.MonkeyPatch, lacks: Lacks = holds_more
) -> list[Rehearsal]:
    """Train with rehearsals that have little room, and compare; all of them, in order."""
    expected = Training(task).run(plain, ITERATIONS).outcome()
    training, made, patiently = Training(task), list[Rehearsal](), points.Listener.patiently
    launching_on_a_cpu(monkeypatch, training.models)
    init = Rehearsal.__init__

    def noted(self: Rehearsal, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    def scarcely(self: points.Listener, act: Any, *args: Any, **kwargs: Any) -> Any:
        (it,) = (it for it in made[-1:] if it._listener is self)
        return patiently(self, crowded(it, act, lacks), *args, **kwargs)

    carriers, begun = list[Carrier](), launching.Launching.__init__

    def carrying(self: launching.Launching, *args: Any) -> None:
        begun(self, *args)
        carriers.append(self._carrier)

    monkeypatch.setattr(launching.Launching, "__init__", carrying)
    monkeypatch.setattr(rehearsal, "settle", lambda device: carriers[-1]._lanes.drain())
    monkeypatch.setattr(Rehearsal, "__init__", noted)
    monkeypatch.setattr(points.Listener, "patiently", scarcely)
    monkeypatch.setattr(launching, "packs", lambda device: True)
    monkeypatch.setattr(listening, "_STAYS", 1.0)
    monkeypatch.setattr(rehearsal, "SMALL", 0)
    monkeypatch.setattr(Rehearsal, "packing", lambda self: NOTHING)
    with belady.virtualize(training.models, "1GiB", policy=policy, engine="graph"):
        training.run(plain, ITERATIONS)
    assert differences(expected, training.outcome()) == []
    return made


@pytest.mark.parametrize("policy", ["baseline", "vdnn_all", "hybrid"])
@pytest.mark.parametrize("task", [CNN, GPT], ids=lambda it: it.name)
def test_where_there_is_no_room_all_else_is_put_away(
    task: Task, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = train(task, policy, monkeypatch)
    # What has failed has left blocks of its own: once more, with room where there was none.
    clean = next(number for number, it in enumerate(made) if not it.flawed)
    assert 1 <= clean <= 3
    assert made[0]._scarce is made[clean]._scarce
    assert any(made[clean]._notes.back)
    assert not any(it.flawed for it in made[clean:])


def test_what_goes_on_to_lack_room_is_placed_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals take long, and none of these is one to pack by."""
    asked, planned = list[bool](), Verification.launched

    def note(self: Verification, *given: Any, packed: bool = False) -> Any:
        asked.append(packed)
        return planned(self, *given, packed=packed)

    tried = dict[tuple[Rehearsal, int], int]()

    def once(it: Rehearsal) -> bool:
        number = tried[it, it._points] = tried.get((it, it._points), 0) + 1
        return number == 1 and bool(it._here)

    monkeypatch.setattr(Verification, "launched", note)
    made = train(CNN, "vdnn_all", monkeypatch, once)
    assert [it.flawed for it in made] == [True] * 5
    assert asked == [True, False]


def test_what_is_handed_out_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may have its address."""
    hand_out, handed = Rehearsal._hand_out, list[bool]()

    def noted(self: Rehearsal, values: Any) -> None:
        names = {it._cdata for it in rehearsal._storages(values)}
        handed.append(bool(names & {*self._held}))
        hand_out(self, values)
        assert not names & {*self._held, *self._here, *self._away}

    monkeypatch.setattr(Rehearsal, "_hand_out", noted)
    train(SHOWING, "floor", monkeypatch)
    assert any(handed), "no result was managed"


def test_where_a_host_has_no_room_either_the_device_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "_HOST", 0.0)
    with pytest.raises(belady.OutOfMemoryError, match="no room"):
        train(CNN, "vdnn_all", monkeypatch)


def test_what_has_no_room_in_host_memory_stays() -> None:
    it = Rehearsal(torch.device("cpu"), 0, 3000, set(), lambda: None)
    values = [torch.zeros(4000, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)]
    it._here = {number: Value(number, of.untyped_storage()) for number, of in enumerate(values)}
    assert it._put_away(set(), 5000)
    assert [of.untyped_storage().nbytes() for of in values] == [4000, 0]
    assert not it._put_away(set(), 5000)


def test_what_is_managed_moves_where_it_lies_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, copy_away, held = set[Value](), Value.copy_away, Rehearsal.held
    managed = set[Value]()

    def noted(self: Value) -> None:
        moved.add(self)
        copy_away(self)

    def holding(self: Rehearsal, *values: Any) -> None:
        held(self, *values)
        managed.update(self._held.values())

    monkeypatch.setattr(Value, "copy_away", noted)
    monkeypatch.setattr(Rehearsal, "held", holding)
    train(CNN, "vdnn_all", monkeypatch)
    assert moved & managed


@pytest.mark.parametrize("seed", range(2))
def test_so_it_is_for_what_any_plan_brings_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, patient = set[int](), rehearsal._Patient.bring

    def noting(self: rehearsal._Patient, value: int) -> None:
        contents, it = self._contents, cast("Any", self._listener.starved).__self__

        def bring(value: int) -> None:
            if it._here and value not in failed:
                failed.add(value)
                raise torch.OutOfMemoryError("no room")
            contents.bring(value)

        patient(rehearsal._Patient(SimpleNamespace(bring=bring), self._listener), value)

    monkeypatch.setattr(rehearsal._Patient, "bring", noting)
    monkeypatch.setattr(verification, "make_plan", partial(at_random, seed=seed))
    train(CNN, "vdnn_all", monkeypatch)
    assert failed


def test_where_there_is_none_at_all_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = points.Listener(lambda: None)
    tried = list[int]()

    def never(number: int) -> None:
        tried.append(number)
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        listener.act(never, 1)
    assert tried == [1]
    with pytest.raises(torch.OutOfMemoryError):
        points.Listener(lambda: None, lambda: True).act(never, 2)
    assert tried == [1, 2, 2]


@pytest.mark.parametrize("times", [1, 3, 4])
def test_what_a_capture_lacks_another_plan_leaves(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known before anything is captured."""
    training, asked, planned = Training(CNN), list[tuple[int, bool]](), Verification.launched
    launching_on_a_cpu(monkeypatch, training.models)
    lacking = 12_345

    def note(self: Verification, *given: Any, packed: bool = False) -> Any:
        asked.append((given[2], packed))
        return planned(self, *given, packed=packed)

    def divide(self: Rerun) -> None:
        if len(asked) <= times:
            raise LackingError(lacking)

    monkeypatch.setattr(Rerun, "divide", divide)
    monkeypatch.setattr(Verification, "launched", note)
    monkeypatch.setattr(launching, "packs", lambda device: True)
    monkeypatch.setattr(Rehearsal, "packing", lambda self: NOTHING)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph") as vm:
        training.run(plain, range(40))
        assert any("launched in one piece" in it for it in vm.report().splitlines())
    (first, packed), *again = asked
    assert packed
    more = [beside - first for beside, packed in again if packed]
    assert len(more) == min(times, 3)
    # And a little: what is packed anew may take more.
    assert all(
        lacking < it <= number * (lacking + (1 << 30) // 100) for number, it in enumerate(more, 1)
    )
    assert more == sorted(set(more))
    # After three of them blocks are placed as the allocator would.
    assert len(again) == len(more) + (times > 3)
