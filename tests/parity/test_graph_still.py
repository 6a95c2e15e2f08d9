"""Launched iterations that read what they are given where it lies, as that lies still."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.errors import StaleValueError
from belady.graph import beside, launching
from belady.graph.beside import still
from belady.graph.kinds import Kind
from belady.graph.launched import Launched
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
        loss = training.task.loss(training.model(x), y)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return [loss]


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


def train(
    task: Task, step: Buffers, policy: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Rerun], list[Launched]]:
    """Train and compare; what stood for graphs, and what was captured."""
    training = Training(task)
    made, captured = launching_on_a_cpu(monkeypatch, training.models), noted(monkeypatch)
    for module in (beside, launching):
        monkeypatch.setattr(module, "still", still)
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
    training, step = Training(CNN), Buffers()
    launching_on_a_cpu(monkeypatch, training.models)
    captured = noted(monkeypatch)
    for module in (beside, launching):
        monkeypatch.setattr(module, "still", still)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
        training.run(step, ITERATIONS)
        (launched,) = captured
        assert launched._still
        x, y = step.taken[0]
        loss = training.task.loss(training.model(x), y)
        x.add_(1)
        with pytest.raises(StaleValueError):
            loss.backward()


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
    monkeypatch.setattr(launching, "_GAINS", -100.0)
    captured, training = noted(monkeypatch), Training(CNN, "cuda")
    with belady.virtualize(training.models, "1GiB", policy=policy, engine="graph"):
        training.run(Buffers(which), range(24))
    assert captured[0]._still
    assert captured[0]._copied == []
    expected = Training(CNN, "cuda").run(plain, range(24)).outcome()
    assert differences(expected, training.outcome()) == []
