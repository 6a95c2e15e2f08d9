"""Iterations that are captured and launched in one piece train as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import belady
from belady.graph import launching
from tests.support.launches import Rerun, launching_on_a_cpu
from tests.support.models import CNN, GPT, TIED, Task
from tests.support.training import (
    Step,
    Training,
    differences,
    plain,
    repeatable,
)

ITERATIONS = range(16)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


def train(task: Task, step: Step, policy: str, monkeypatch: pytest.MonkeyPatch) -> list[Rerun]:
    """Train and compare; what stood for graphs."""
    expected = Training(task).run(step, ITERATIONS).outcome()
    training = Training(task)
    made = launching_on_a_cpu(monkeypatch, training.models)
    with belady.virtualize(training.models, "1GiB", policy=policy, engine="graph"):
        training.run(step, ITERATIONS)
    assert differences(expected, training.outcome()) == []
    return made


@pytest.mark.parametrize("policy", ["baseline", "vdnn_all", "floor"])
@pytest.mark.parametrize("task", [CNN, GPT, TIED], ids=lambda it: it.name)
def test_launches_train_as_plain_pytorch(
    task: Task, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = train(task, plain, policy, monkeypatch)
    assert only.launched >= 8


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["graph", "inductor"])
@pytest.mark.parametrize("policy", ["baseline", "vdnn_all", "floor", "hybrid"])
@pytest.mark.parametrize("task", [CNN, GPT, TIED], ids=lambda it: it.name)
def test_launches_of_a_gpu_train_as_plain_pytorch(
    task: Task, policy: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_GAINS", -100.0)
    replayed: list[None] = []
    replay = torch.cuda.CUDAGraph.replay
    outcomes = []
    for launches in (False, True):
        monkeypatch.setattr(launching, "captures", lambda device, it=launches: it)
        monkeypatch.setattr(
            torch.cuda.CUDAGraph, "replay", lambda it: (replayed.append(None), replay(it))
        )
        training = Training(task, "cuda")
        # Nothing is near the budget but what moves whatever there is.
        with belady.virtualize(training.models, "8GiB", policy=policy, engine=engine) as vm:
            training.run(plain, ITERATIONS)
            said = vm.report()
        outcomes.append(training.outcome())
        assert ("CUDA graphs" in said) is launches
        assert (len(replayed) >= 16) is launches
    expected, actual = outcomes
    assert differences(expected, actual) == []
    if engine == "graph":
        assert differences(Training(task, "cuda").run(plain, ITERATIONS).outcome(), actual) == []
