"""Launched iterations that read what they are given where it lies, as that lies still."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import belady
from belady.errors import StaleValueError
from belady.graph import beside
from belady.graph.beside import still
from belady.graph.kinds import Kind
from belady.graph.launched import Launched
from belady.graph.prospect import Again, Beside, Prospect
from tests.parity.test_graph_launched import CNN, FIRST, GPT, ITERATIONS, noted
from tests.support.launches import Rerun, launching_on_a_cpu
from tests.support.models import Task
from tests.support.training import Training, differences, plain, repeatable


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


class Buffers:
    """A step that copies each batch to one of some tensors, and reads it there."""

    def __init__(self, which: Callable[[int], int] = lambda index: 0) -> None:
        self._which = which
        self.taken: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, training: Training, index: int) -> list[Tensor]:
        batch = training.batch(index)
        x, y = self.taken.setdefault(self._which(index), batch)
        x.copy_(batch[0])
        y.copy_(batch[1])
        loss = self.loss(training, x, y)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        # A launch reads it, and that is all.
        assert torch.equal(x, batch[0])
        return [loss]

    def loss(self, training: Training, x: Tensor, y: Tensor) -> Tensor:
        return training.task.loss(training.model(x), y)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of copies that plans are asked to leave room for."""
    found: list[int] = []
    fixed = beside.fixed_bytes

    def note(kind: Kind) -> int:
        found.append(fixed(kind))
        return found[-1]

    monkeypatch.setattr("belady.graph.planning.fixed_bytes", note)
    return found


def launching(monkeypatch: pytest.MonkeyPatch, models: Sequence[nn.Module]) -> list[Rerun]:
    """As `launching_on_a_cpu`, where what lies still is read there."""
    made = launching_on_a_cpu(monkeypatch, models)
    monkeypatch.setattr(beside, "still", still)
    return made


@contextmanager
def forward_launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """What a forward was given, which was launched, and its loss: nobody else holds either."""
    training, step = Training(CNN), Buffers()
    made = launching(monkeypatch, training.models)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
        training.run(step, ITERATIONS)
        before = made[-1].launched
        x, y = step.taken.pop(0)
        given = [x, step.loss(training, x, y)]
        del x
        assert made[-1].launched == before + 1
        yield given


def train(
    task: Task, step: Buffers, policy: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Rerun], list[Launched]]:
    """Train and compare; what stood for graphs, and what was captured."""
    training = Training(task)
    made, captured = launching(monkeypatch, training.models), noted(monkeypatch)
    with belady.virtualize(training.models, "1GiB", policy=policy, engine="graph"):
        training.run(step, ITERATIONS)
    expected = Training(task).run(plain, ITERATIONS).outcome()
    assert differences(expected, training.outcome()) == []
    return made, captured


@pytest.mark.parametrize("policy", ["baseline", "vdnn_all", "hybrid"])
@pytest.mark.parametrize("task", [CNN, GPT], ids=lambda it: it.name)
def test_what_lies_still_is_not_copied(
    task: Task, policy: str, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, (launched,) = train(task, Buffers(), policy, monkeypatch)
    assert made[0].launched == 2 * (len(ITERATIONS) - FIRST)
    assert launched._still
    assert launched._copied == []
    assert {*counted} == {0}


def test_what_does_not_is(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made, (launched,) = train(CNN, Buffers(lambda index: index % 2), "vdnn_all", monkeypatch)
    assert made[0].launched == 2 * (len(ITERATIONS) - FIRST)
    assert launched._still == []
    assert launched._copied
    assert 0 not in counted


def test_what_moves_once_it_was_captured_is_copied_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, (first, *later) = train(CNN, Buffers(lambda index: index // 9), "vdnn_all", monkeypatch)
    assert first._still
    assert later
    assert not any(it._still for it in later)


def test_what_is_changed_before_backward_is_an_error_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with forward_launched(monkeypatch) as (x, loss):
        x.add_(1)
        with pytest.raises(StaleValueError):
            loss.backward()


class Twice(Buffers):
    """Backward comes twice at last."""

    def loss(self, training: Training, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(training, x, y)
        if len(training.losses) > 12:
            loss.backward(retain_graph=True)
        return loss


class Looking(Buffers):
    """What is read lies in the middle of another tensor, and is validated with in between."""

    def loss(self, training: Training, x: Tensor, y: Tensor) -> Tensor:
        if not hasattr(self, "_around"):
            self._around = torch.zeros(3, *x.shape, dtype=x.dtype)
        within = self._around[1]
        within.copy_(x)
        loss = super().loss(training, within, y)
        if training.optimizer.state and len(training.losses) == 10:
            training.model.eval()
            with torch.no_grad():
                training.model(within)
            training.model.train()
        assert torch.equal(within, x)
        return loss


@pytest.mark.parametrize("step", [Twice, Looking])
def test_habits_of_training(step: type[Buffers], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Training(CNN).run(step(), ITERATIONS).outcome()
    training = Training(CNN)
    launching(monkeypatch, training.models)
    captured = noted(monkeypatch)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
        training.run(step(), ITERATIONS)
    assert captured[0]._still
    assert differences(expected, training.outcome()) == []


@pytest.mark.parametrize("goes_back", [True, False])
def test_a_batch_is_held_until_backward_and_no_longer(
    goes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forward_launched(monkeypatch) as given:
        held = StorageWeakRef(given[0].untyped_storage())
        del given[0]
        assert not held.expired()
        if goes_back:
            given[0].backward()
        given.clear()
        gc.collect()
        assert held.expired()


def test_without_room_for_what_has_moved_a_plan_is_asked_for_that_has_it() -> None:
    prospect = Prospect(packs=True)
    prospect.failed(0, copied_bytes=8)
    assert (prospect.packs, prospect.again) == (True, Again.WANTED)
    # Where that was counted, packed blocks are what has no room.
    prospect = Prospect(packs=True, beside=Beside(copies=8))
    prospect.failed(0, copied_bytes=8)
    assert (prospect.packs, prospect.again) == (False, Again.WANTED)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(torch.view_as_real(x * 1.0).flatten(1))
        return result


def test_what_is_conjugate_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(engine: str) -> list[float]:
        torch.manual_seed(0)
        model, losses = Spectrum(), []
        made = launching(monkeypatch, [model])
        descent, buffer = torch.optim.SGD(model.parameters(), 0.1), torch.zeros(8, 16) + 0j
        ours = partial(belady.virtualize, model, "1GiB", policy="vdnn_all", engine=engine)
        with ours() if engine else nullcontext():
            for index in ITERATIONS:
                generator = torch.Generator().manual_seed(index)
                buffer.copy_(torch.randn(8, 16, dtype=torch.complex64, generator=generator))
                loss = model(buffer.conj()).square().mean()
                loss.backward()
                descent.step()
                descent.zero_grad()
                losses.append(loss.item())
        assert bool(made) is bool(engine)
        return losses

    assert trained("graph") == trained("")


def test_nothing_is_captured_that_writes_to_what_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = CNN.models()[0]

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(1.0)
            result: Tensor = self.inner(x)
            return result

    task = replace(CNN, models=lambda: [Writing()])
    _, captured = train(task, Buffers(), "vdnn_all", monkeypatch)
    assert captured == []


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["baseline", "vdnn_all", "hybrid"])
@pytest.mark.parametrize("which", [lambda index: 0, lambda index: index // 12])
def test_on_a_gpu_too(
    which: Callable[[int], int], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belady.graph.launching._GAINS", -100.0)
    captured, training = noted(monkeypatch), Training(CNN, "cuda")
    with belady.virtualize(training.models, "1GiB", policy=policy, engine="graph"):
        training.run(Buffers(which), range(24))
    assert captured[0]._still
    assert captured[0]._copied == []
    expected = Training(CNN, "cuda").run(plain, range(24)).outcome()
    assert differences(expected, training.outcome()) == []
