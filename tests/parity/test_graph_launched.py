"""Iterations that are captured and launched in one piece train as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import belady
from tests.support.launches import Rerun, launching_on_a_cpu
from tests.support.models import CNN, GPT, LSTM, TIED, Task
from tests.support.training import (
    Step,
    Training,
    differences,
    plain,
    repeatable,
)

ITERATIONS = range(14)


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
@pytest.mark.parametrize("task", [CNN, GPT, LSTM, TIED], ids=lambda it: it.name)
def test_launches_train_as_plain_pytorch(
    task: Task, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = train(task, plain, policy, monkeypatch)
    assert only.launched >= 8
