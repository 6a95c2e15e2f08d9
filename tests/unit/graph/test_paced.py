"""One iteration shows how fast kernels are that nobody has watched: the device is held back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import belady
from belady.graph.kinds import Kind
from belady.graph.planning import Planning
from belady.measure.stages import Stage
from belady.memory.pace import Pace
from tests.support.models import CNN
from tests.support.training import Training, plain, repeatable


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("unwatched", [True, False])
def test_each_part_of_one_iteration_is_held_back(
    unwatched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[float] = []
    monkeypatch.setattr(Pace, "hold", lambda pace, seconds, ops: held.append(seconds))
    monkeypatch.setattr(Planning, "unwatched", unwatched)
    training, counts = Training(CNN), list[int]()
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
        for index in range(8):
            training.run(plain, [index])
            counts.append(len(held))
            assert all(0 < seconds <= 1 for seconds in held)
            held.clear()
    # After two that are observed and one that settles, its forward and its backward.
    assert counts == [0, 0, 0, 2 * unwatched, 0, 0, 0, 0]


def test_the_host_is_ahead_by_what_it_took_for_a_part_before() -> None:
    kind = Kind(Stage.PACED, moments=[1.0, 1.25, 4.5])
    # Not for longer than a second; nor for less, where nobody knows.
    assert [kind.lead(part) for part in range(4)] == [0.25, 1.0, 1.0, 1.0]
    kind.stage = Stage.VERIFYING
    assert kind.lead(0) == 0.0
