"""Who listens to torch's allocator stops with the engine, and where another iteration comes."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import Tensor

import belady
from belady.measure import monitor
from belady.measure.stages import Stage
from belady.memory import piece
from belady.memory.piece import Piece
from belady.simulate.stretch import Event
from tests.support.models import CNN
from tests.support.training import (
    Step,
    Training,
    differences,
    plain,
    repeatable,
    short_at_the_end,
)

ITERATIONS = range(12)


class Listens:
    """What stands for a ledger that hears nothing, and so is asked again."""

    made: list[Listens]

    def __init__(self, _device: torch.device) -> None:
        self.open = self.begun = False
        self.made.append(self)

    def begin(self) -> None:
        assert not any(it.open for it in self.made if it is not self)
        self.open = self.begun = True

    def end(self) -> list[Event]:
        self.open = False
        return []

    def drop(self) -> None:
        self.open = False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Listens]:
    """Ledgers, where each iteration counts as one in which the allocator flushed its cache."""
    found: list[Listens] = []
    went = Piece.went
    monkeypatch.setattr(Listens, "made", found, raising=False)
    monkeypatch.setattr(piece, "Ledger", Listens)
    monkeypatch.setattr(Piece, "went", lambda self, *, flushed: went(self, flushed=not flushed))
    return found


def in_turn(training: Training, index: int) -> list[Tensor]:
    """Batches of two sizes, in turn."""
    return short_at_the_end(training, ITERATIONS[-1] if index % 2 else 0)


@pytest.mark.parametrize(
    ("engine", "step"), [("eager", plain), ("graph", plain), ("graph", in_turn)]
)
def test_nobody_is_listened_to_in_the_end(engine: str, step: Step, made: list[Listens]) -> None:
    with repeatable():
        training = Training(CNN)
        with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine=engine):
            training.run(step, ITERATIONS)
        assert any(it.begun for it in made)
        assert not any(it.open for it in made)


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_steady_iterations_in_which_the_allocator_flushes_are_verified_again(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[Stage] = []
    flushes = count()

    def retries(_device: torch.device) -> int:
        return next(flushes) if 7 <= len(stages) < 9 else 0

    monkeypatch.setattr(monitor, "_retries", retries)
    with repeatable():
        expected = Training(CNN).run(plain, range(14)).outcome()
        training = Training(CNN)
        with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine=engine) as vm:

            def step(it: Training, index: int) -> list[Tensor]:
                losses = plain(it, index)
                (kind,) = vm._tracker.conductor._kinds.values()
                stages.append(kind.stage)
                return losses

            training.run(step, range(14))
        assert differences(expected, training.outcome()) == []
    assert stages[6] is Stage.STEADY
    assert Stage.VERIFYING in stages[7:11]
    assert stages[-1] is Stage.STEADY
