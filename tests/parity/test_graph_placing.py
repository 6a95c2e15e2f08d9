"""Gradients that a graph puts elsewhere as soon as they are made: equal bits, and nothing kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import belady.graph.placing as placing
from belady.graph.contents import Place
from belady.graph.optimizers import Following
from belady.graph.orders import orders_of
from belady.graph.placing import Places, gradients_of
from belady.ir.hardware import Allocator
from belady.ir.trace import StorageKind, Trace
from belady.simulate.blocks import InBlocks
from tests.parity.graphs import PlannedHost, compiled
from tests.parity.racing import hostile_carrier, random_plan
from tests.support.models import CNN, GAN, GPT, TIED, Task
from tests.support.training import (
    Step,
    Training,
    accumulating,
    adversarial,
    autocast,
    differences,
    plain,
    twice_backward,
)


class Under(NamedTuple):
    """What `Places` was asked, and what it did."""

    ask: Callable[..., Place | None]
    places: Places
    held: list[int]
    closed: list[None]
    trace: Trace


class Elsewhere:
    """Copies a gradient and spoils what it was made in, as another value there would."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []
        self.kept = 0

    def __call__(self, gradient: Tensor) -> Tensor:
        placed = gradient.clone(memory_format=torch.preserve_format)
        gradient.fill_(float("nan"))
        # Before the next one is made, nobody holds the one that was left.
        self.kept += sum(it() is not None for it in self.made)
        self.made.append(weakref.ref(gradient))
        return placed


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "LARGE_BYTES", 0)


def planned(task: Task, step: Step, count: int, place: Elsewhere) -> tuple[list[str], PlannedHost]:
    expected = Training(task, "cpu").run(step, range(count)).outcome()
    training, carrier = Training(task, "cpu"), hostile_carrier("threads")
    host = PlannedHost(
        training.models, carrier, lambda trace: random_plan(trace, "threads", 1), place
    )
    try:
        with compiled(training, host):
            training.run(step, range(count))
    finally:
        carrier.close()
    return differences(expected, training.outcome()), host


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("task", [CNN, GPT, TIED, GAN], ids=str)
def test_no_bit_changes(task: Task) -> None:
    place = Elsewhere()
    wrong, host = planned(task, adversarial if task is GAN else plain, 3, place)
    assert wrong == []
    assert place.made
    assert place.kept == 0
    assert host.reasons == []


@pytest.mark.parametrize(
    "step", [autocast, accumulating, twice_backward], ids=lambda step: step.__name__
)
def test_no_bit_changes_however_people_train(step: Step) -> None:
    place = Elsewhere()
    wrong, _ = planned(CNN, step, 3, place)
    assert wrong == []
    assert place.made


def test_each_large_gradient_of_a_parameter_is_placed_once() -> None:
    place = Elsewhere()
    _, host = planned(CNN, plain, 2, place)
    (drawn,) = host.drawn
    storages = drawn.trace.storages
    gradients = [it for it in storages if it.kind is StorageKind.GRADIENT]
    # A gradient that is a view of what else goes out stays; this model has none.
    assert len(place.made) == 2 * len(gradients)


def test_what_is_small_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sorted(
        parameter.nbytes
        for model in Training(CNN, "cpu").models
        for parameter in model.parameters()
    )
    monkeypatch.setattr(placing, "LARGE_BYTES", sizes[-2])
    place = Elsewhere()
    planned(CNN, plain, 1, place)
    assert len(place.made) == 1


def test_gradients_stay_unless_asked() -> None:
    _, host = planned(CNN, plain, 1, Elsewhere())
    (drawn,), (plan,) = host.drawn, host.plans
    assert all(not it.apart for it in orders_of(drawn, plan))
    assert any(it.apart for it in orders_of(drawn, plan, gradients_apart=True))


# -- which gradients ------------------------------------------------------------------------------


class Chunks(nn.Module):
    """Two weights whose gradients lie on the same bytes, and one whose does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.third = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack((self.first, self.second)).view(2 * WIDTH, WIDTH)
        return (x @ both.t()).chunk(2, 1)[0].tanh() @ self.third


def rows(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, WIDTH, generator=generator)
    return x, torch.randint(WIDTH, (size,), generator=generator)


WIDTH = 8
CHUNKS = Task("chunks", lambda: [Chunks()], rows)


def test_gradients_on_the_same_bytes_stay() -> None:
    place = Elsewhere()
    wrong, host = planned(CHUNKS, plain, 2, place)
    assert wrong == []
    (part, _) = host.drawn[0].parts
    joint, layout = part.joint, part.layout
    storages = [layout.storage_of[node] for node in joint.backward_outputs if node is not None]
    assert len({*storages}) < len(storages)
    assert len(gradients_of(part)) == 1


def test_gradients_that_are_written_to_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    _, host = planned(CNN, plain, 1, Elsewhere())
    (part, _) = host.drawn[0].parts
    found = gradients_of(part)
    written = part.layout.storage_of[found[0]]
    monkeypatch.setattr(type(part.layout), "writes_to", lambda _, step: [written])
    assert gradients_of(part) == found[1:]


# -- where they go --------------------------------------------------------------------------------


@pytest.fixture
def under(monkeypatch: pytest.MonkeyPatch) -> Under:
    """A plan after another, which has gradients apart or not."""
    _, host = planned(CNN, plain, 1, Elsewhere())
    trace, plan = replace(host.drawn[0].trace, device="cuda"), host.plans[0]
    places = Places(torch.device("cpu"), [])
    held: list[int] = []
    closed: list[None] = []
    monkeypatch.setattr(places._gradients, "hold", held.append)
    monkeypatch.setattr(places._gradients, "close", lambda: closed.append(None))
    monkeypatch.setattr(places._gradients, "copy", Tensor.clone)

    def ask(of: str, *, apart: bool) -> Place | None:
        monkeypatch.setattr(placing, "in_blocks", lambda *_: InBlocks(0, apart))
        return places.under(of, trace, plan, Allocator(1, 0.1, 0))

    return Under(ask, places, held, closed, trace)


def test_memory_is_held_for_gradients_of_the_plan(under: Under) -> None:
    place = under.ask("one", apart=True)
    assert place is not None
    made = torch.ones(4)
    assert place(made) is not made
    # Views of others' bytes stay.
    part = made[:2]
    assert place(part) is part
    gradients = [it for it in under.trace.storages if it.kind is StorageKind.GRADIENT]
    assert under.held == [sum(it.nbytes for it in gradients)]
    under.places.close()
    assert place(made) is made


def test_it_is_given_up_when_no_plan_has_gradients_there(under: Under) -> None:
    under.ask("one", apart=True)
    under.ask("two", apart=True)
    assert under.ask("one", apart=False) is None
    assert under.closed == []
    assert under.ask("two", apart=False) is None
    assert under.closed == [None]


# -- the state of optimizers ----------------------------------------------------------------------


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[torch.optim.Optimizer]:
    found: list[torch.optim.Optimizer] = []

    def settle(optimizer: torch.optim.Optimizer, place: Callable[[Tensor], Tensor | None]) -> None:
        found.append(optimizer)

    monkeypatch.setattr(placing, "settle_state", settle)
    return found


def test_an_optimizer_that_has_made_no_state_is_asked_again(
    settled: list[torch.optim.Optimizer],
) -> None:
    model = nn.Linear(4, 4)
    places = Places(torch.device("cpu"), [model])
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    places.stepped(optimizer)
    assert settled == []
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    places.stepped(optimizer)
    assert settled == [optimizer]


def test_a_step_that_is_compiled_tells_too() -> None:
    model = nn.Linear(1024, 1024)
    places, moved = Places(torch.device("cpu"), [model]), list[int]()
    places._state.copy = lambda tensor: moved.append(tensor.nbytes)  # type: ignore[method-assign]
    optimizer = torch.optim.Adam(model.parameters())
    Following(places, ended="stepped")
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    try:
        for _ in range(2):
            model(torch.ones(2, 1024)).sum().backward()
            step()
    finally:
        torch._dynamo.reset()
    # Adam's two moments of the weight, once.
    assert moved == [4 * 2**20] * 2


def test_state_is_settled_once_for_each_optimizer_of_the_models(
    settled: list[torch.optim.Optimizer],
) -> None:
    ours, other = nn.Linear(4, 4), nn.Linear(4, 4)
    places = Places(torch.device("cpu"), [ours])
    mine, foreign = stepped(ours), stepped(other)
    for _ in range(2):
        places.stepped(mine)
        places.stepped(foreign)
    assert settled == [mine]
    places.close()
    places.stepped(stepped(ours))
    assert settled == [mine]


@pytest.mark.gpu
def test_on_a_gpu_optimizers_tell_while_it_lives(settled: list[torch.optim.Optimizer]) -> None:
    model = nn.Linear(4, 4)
    places = Places(torch.device("cuda"), [model])
    first = stepped(model)
    assert settled == [first]
    del places
    stepped(model)
    assert settled == [first]
