"""Iterations that are rehearsed before they are captured, and whose blocks are packed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.errors import InfeasibleBudgetError
from belady.graph import launching, listening, prospect, rehearsal, told
from belady.graph.iteration import Iteration
from belady.graph.launched import Launched
from belady.graph.launching import Launching
from belady.graph.program import Program
from belady.graph.rehearsal import Rehearsal
from belady.measure import verification
from belady.measure.verification import Verification
from belady.memory.filling import Filling
from belady.memory.ledger import Ledger
from belady.memory.marks import Mark
from belady.simulate.packing import Packing, held_bytes
from belady.simulate.stretch import LEAST, Event
from tests.parity.test_graph_launched import CNN, GPT, ITERATIONS, at_random
from tests.support.launches import Rerun, launching_on_a_cpu
from tests.support.listening import SMALL, Notebook, listening_on_a_cpu
from tests.support.models import TIED, Task
from tests.support.training import (
    Step,
    Training,
    accumulating,
    autocast,
    clipping,
    differences,
    evaluating,
    plain,
    repeatable,
)
from tests.unit.memory.test_filling import OneStretch

NOTHING = Packing((), (), 0)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


def train(task: Task, step: Step, policy: str, monkeypatch: pytest.MonkeyPatch) -> list[Rehearsal]:
    """Train with rehearsals that leave next to nothing where it is, and compare; these."""
    expected = Training(task).run(step, ITERATIONS).outcome()
    training, made = Training(task), list[Rehearsal]()
    launching_on_a_cpu(monkeypatch, training.models)
    monkeypatch.setattr(launching, "packs", lambda device: True)
    monkeypatch.setattr(listening, "_STAYS", 0.0)
    monkeypatch.setattr(rehearsal, "SMALL", 0)
    monkeypatch.setattr(Rehearsal, "packing", lambda self: made.append(self) or NOTHING)
    with belady.virtualize(training.models, "1GiB", policy=policy, engine="graph"):
        training.run(step, ITERATIONS)
    assert differences(expected, training.outcome()) == []
    return made


@pytest.mark.parametrize("policy", ["baseline", "vdnn_all", "floor", "hybrid"])
@pytest.mark.parametrize("task", [CNN, GPT, TIED], ids=lambda it: it.name)
def test_a_rehearsal_trains_as_plain_pytorch(
    task: Task, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = train(task, plain, policy, monkeypatch)
    assert any(only._notes.back), "nothing was put away and came back"


@pytest.mark.parametrize("step", [accumulating, autocast, clipping])
def test_ways_to_write_an_iteration(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    train(CNN, step, "vdnn_all", monkeypatch)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("task", [CNN, GPT], ids=lambda it: it.name)
def test_any_plan_can_be_rehearsed(task: Task, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "make_plan", partial(at_random, seed=seed))
    train(task, plain, "vdnn_all", monkeypatch)


@pytest.mark.parametrize(("task", "seed"), [(CNN, 0), (GPT, 1)], ids=str)
def test_the_blocks_of_any_plan_are_known(
    task: Task, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "make_plan", partial(at_random, seed=seed))
    training = Training(task)
    launching_on_a_cpu(monkeypatch, training.models)
    packings, book = listening_on_a_cpu(monkeypatch)
    monkeypatch.setattr(rehearsal, "_MOST_S", 0.0)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
        training.run(plain, ITERATIONS)
    (packing,) = packings
    found, _ = as_captured(packing, book)
    # Where they lie is not asked: what is packed at once may hang.
    assert [nbytes for _, nbytes in found] == [it.nbytes for it in packing.lives]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("step", [evaluating, accumulating])
def test_a_plan_for_packed_blocks_is_rehearsed_or_launched(
    step: Step, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is issued it would run out of memory; so it would in an iteration whose capture did."""
    bare, ran, program = list[int](), list[int](), Launching.program

    def note(self: Launching, iteration: Iteration, call: int, args: Any) -> Program:
        found = program(self, iteration, call, args)
        force, kind = iteration.kind.force, iteration.kind
        if kind.prospect.tight and force is not None:
            ran.append(call)
            bare.extend([call] if any(found is it for it in force.programs) else [])
        return found

    def lacking(self: Rerun, issue: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Launching, "program", note)
    if fails:
        monkeypatch.setattr(Rerun, "capture", lacking)
        monkeypatch.setattr(prospect, "_CROWDED", 1)
    train(CNN, step, "vdnn_all", monkeypatch)
    assert ran
    assert bare == []


def looking_back(training: Training, index: int) -> list[Tensor]:
    """Reads what forward gave when backward is over, as who counts what was right does."""
    x, y = training.batch(index)
    given = training.model(x)
    training.task.loss(given, y).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [training.task.loss(given.detach() * 2, y), given.detach().float().sum()]


def going_back_twice(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)
    loss.backward(retain_graph=index in (7, 8))
    if index in (7, 8):
        loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


@pytest.mark.parametrize("policy", ["baseline", "vdnn_all"])
@pytest.mark.parametrize("step", [looking_back, going_back_twice])
def test_what_a_rehearsal_hands_out_stays(
    step: Step, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(CNN, step, policy, monkeypatch)


def test_what_others_take_after_backward_is_no_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hearing(Ledger):
        """Hears a block of clipping, or of the next batch."""

        listens = True

        def end(self) -> list[Event]:
            return [(0, 5 << 20), (0, 0)]

    monkeypatch.setattr(launching, "Ledger", Hearing)
    (only,) = train(CNN, plain, "vdnn_all", monkeypatch)
    assert any(only._notes.back)


def test_without_room_in_host_memory_nothing_is_put_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "_HOST", 0.0)
    (only,) = train(CNN, plain, "vdnn_all", monkeypatch)
    assert not only._notes.away


@pytest.mark.parametrize("fails", ["capture", "plan", "rehearsal"])
def test_what_cannot_be_packed_is_placed_as_ever(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, planned = list[bool](), Verification.launched
    capture = Rerun.capture

    def note(self: Verification, *given: Any, packed: bool = False) -> Any:
        asked.append(packed)
        if fails == "plan" and asked == [True, True]:
            raise InfeasibleBudgetError(
                needed_bytes=2, budget_bytes=1, smallest_bytes=2, op="", module=""
            )
        return planned(self, *given, packed=packed)

    def lacking(self: Rerun, issue: Any) -> Any:
        if asked[-1]:
            raise torch.OutOfMemoryError("no room")
        return capture(self, issue)

    monkeypatch.setattr(Verification, "launched", note)
    if fails != "rehearsal":
        monkeypatch.setattr(Rerun, "capture", lacking)
        monkeypatch.setattr(prospect, "_CROWDED", 1 if fails == "capture" else 3)
        rehearsed = train(CNN, plain, "vdnn_all", monkeypatch)
        assert len(rehearsed) == (2 if fails == "capture" else 1)
    else:
        expected = Training(CNN).run(plain, ITERATIONS).outcome()
        training = Training(CNN)
        launching_on_a_cpu(monkeypatch, training.models)
        monkeypatch.setattr(launching, "packs", lambda device: True)
        with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
            # Nobody listens on a CPU, so nothing is known of its blocks.
            training.run(plain, ITERATIONS)
        assert differences(expected, training.outcome()) == []
    # Once more with more room.
    assert asked == ([True, False] if fails == "rehearsal" else [True, True, False])


@pytest.mark.parametrize(
    ("task", "policy", "engine"),
    [
        (GPT, "vdnn_all", "graph"),
        (GPT, "hybrid", "graph"),
        (TIED, "floor", "graph"),
        (GPT, "hybrid", "inductor"),
        (TIED, "vdnn_all", "inductor"),
    ],
)
def test_what_is_captured_takes_the_blocks_of_its_rehearsal(
    task: Task, policy: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated of what a CPU's allocator was asked for, since it packs nothing."""
    training = Training(task)
    launching_on_a_cpu(monkeypatch, training.models)
    packings, book = listening_on_a_cpu(monkeypatch)
    with belady.virtualize(training.models, "1GiB", policy=policy, engine=engine):
        training.run(plain, ITERATIONS)
    (packing,) = packings
    found, missed = as_captured(packing, book)
    assert [nbytes for _, nbytes in found] == [it.nbytes for it in packing.lives]
    assert len(found) >= 10
    assert packing.end <= 1.005 * held_bytes(packing.lives)
    assert [at for at, _ in found] == list(packing.addresses)
    assert missed == []


def as_captured(packing: Packing, book: Notebook) -> tuple[list[tuple[int, int]], list[int]]:
    """Addresses and bytes of the blocks of a capture, and those whose place was not free."""
    events, _ = book.numbered()
    begin = next(place for place, (_, nbytes) in enumerate(events) if nbytes == Mark.BEGIN)
    memory, held, found = OneStretch(packing.end + 4 * SMALL), dict[int, object](), []
    filling = Filling(memory, packing)
    filling.open()
    for block, nbytes in events[begin:]:
        if nbytes == Mark.POINT:
            filling.point()
        elif nbytes > SMALL and nbytes not in {*Mark}:
            nbytes = -(-nbytes // LEAST) * LEAST
            at, held[block] = memory.take(nbytes)
            found.append((at, nbytes))
        elif not nbytes:
            held.pop(block, None)
    filling.close()
    return found, filling.missed


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["graph", "inductor"])
@pytest.mark.parametrize("policy", ["baseline", "vdnn_all", "hybrid"])
@pytest.mark.parametrize("task", [CNN, GPT, TIED], ids=lambda it: it.name)
def test_what_a_gpu_has_rehearsed_trains_as_plain_pytorch(
    task: Task, policy: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_GAINS", -100.0)
    monkeypatch.setattr(listening, "_STAYS", 0.0)
    # Blocks of these networks are small, and none of them is packed.
    monkeypatch.setattr(rehearsal, "SMALL", 0)
    monkeypatch.setattr(Rehearsal, "packing", lambda self: NOTHING)
    outcomes = []
    for packs in (False, True):
        monkeypatch.setattr(launching, "packs", lambda device, it=packs: it)
        training = Training(task, "cuda")
        with belady.virtualize(training.models, "1GiB", policy=policy, engine=engine) as vm:
            training.run(plain, ITERATIONS)
            assert told.NOTE in vm.report()
        outcomes.append(training.outcome())
    unpacked, actual = outcomes
    assert differences(unpacked, actual) == []
    if engine == "graph":
        assert differences(Training(task, "cuda").run(plain, ITERATIONS).outcome(), actual) == []


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["graph", "inductor"])
def test_large_blocks_lie_where_they_are_packed(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_GAINS", -100.0)
    found, captured = list[Launched](), Launching._captured

    def noted(self: Launching, *given: Any) -> Launched | None:
        made = captured(self, *given)
        found.extend([] if made is None else [made])
        return made

    monkeypatch.setattr(Launching, "_captured", noted)
    # What ops have made hardly stays while it is rehearsed.
    monkeypatch.setattr(listening, "_STAYS", 0.1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), *layers).cuda()
    x = torch.randn(64, 3, 128, 128, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with belady.virtualize(model, "2GiB", policy="vdnn_all", engine=engine) as vm:
        for _ in range(16):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert told.NOTE in vm.report()
    (launched,) = found
    packing = launched.launches._packing
    assert packing is not None
    assert packing.lives
    assert launched._filling is not None
    assert [packing.lives[it] for it in launched._filling.missed] == []
    assert packing.end <= 1.1 * held_bytes(packing.lives)
