"""Values held in fewer bytes give plain PyTorch's bits, also where the program changes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import belady
from belady.errors import StaleValueError
from belady.ir.encoding import encoding_of
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Assignment, Budget, Encode, Plan
from belady.ir.trace import Tier, Trace
from belady.memory import codecs
from belady.simulate import simulate
from tests.parity.graphs import PlannedHost, compiled
from tests.parity.racing import ROOM, Observed, hostile_carrier, observed, train
from tests.support.models import Task
from tests.support.training import (
    Step,
    Training,
    accumulating,
    autocast,
    differences,
    plain,
    twice_backward,
)

BEFORE = 5


class Picture(nn.Module):
    """ReLUs before poolings of every kind, indices, a mask; what a training loop sets changes."""

    signs, where, spoilt = True, True, False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.third, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        # What a clamp saves has the geometry of what a ReLU saves, and is read in full.
        positive = F.relu(x) if self.signs else x.clamp(min=0.1)
        x = self.second(F.max_pool2d(positive, 2))
        if self.spoilt:
            positive.mul_(2)
        x = x.masked_fill(x > 1 if self.where else x < -1, 0.5)
        x = F.avg_pool2d(F.relu(self.third(x), inplace=True), 2)
        return self.last(F.max_pool2d(x, 3, 1, 1).flatten(1))


def images(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 3, 16, 16, generator=generator)
    return x, torch.randint(10, (size,), generator=generator)


PICTURE = Task("picture", lambda: [Picture()], images)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def encoding_all(trace: Trace) -> Plan:
    found = {value: encoding_of(trace, value) for value in trace.saved}
    assignments = tuple(
        Assignment(v, Encode(*it, trace.values[v].first_save, trace.values[v].first_read or 0))
        for v, it in found.items()
        if it is not None
    )
    return Plan(trace.fingerprint, "encodings/1", Budget(ROOM), assignments)


def codecs_of(plan: Plan) -> set[str]:
    return {it.codec for it in plan.decisions.values() if isinstance(it, Encode)}


@functools.cache
def seen_of(step: Step, device: str) -> Observed:
    return observed(PICTURE, step, device)


@pytest.fixture(params=[codecs.PIECE, 64], ids=["whole", "pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "PIECE", request.param)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "step", [plain, accumulating, twice_backward, autocast], ids=lambda it: it.__name__
)
def test_encoded_values_change_no_bit(step: Step, device: str) -> None:
    seen = seen_of(step, device)
    plan = encoding_all(seen.trace)
    assert codecs_of(plan) == {"sign", "bits", "uint8"}
    carrier = hostile_carrier("direct" if device == "cpu" else device)
    try:
        outcome, engine = train(PICTURE, step, plan, seen, carrier)
    finally:
        carrier.close()
    assert differences(Training(PICTURE, device).run(step, range(2)).outcome(), outcome) == []
    assert not engine.defaults


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [plain, accumulating], ids=lambda it: it.__name__)
def test_so_do_those_of_a_graph(step: Step, device: str) -> None:
    training = Training(PICTURE, device)
    carrier = hostile_carrier("direct" if device == "cpu" else device)
    host = PlannedHost(training.models, carrier, encoding_all)
    try:
        with compiled(training, host):
            training.run(step, range(2))
    finally:
        carrier.close()
    expected = Training(PICTURE, device).run(step, range(2)).outcome()
    assert differences(expected, training.outcome()) == []
    assert [codecs_of(plan) for plan in host.plans] == [{"sign", "bits", "uint8"}]


def test_a_mistake_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs that are lost, of one element in eight, are another gradient."""
    real = codecs._signs

    def spoilt(flat: Tensor) -> Tensor:
        packed = real(flat)
        return packed ^ 8

    monkeypatch.setattr(codecs, "_signs", spoilt)
    seen = seen_of(plain, "cpu")
    carrier = hostile_carrier("direct")
    try:
        outcome, _ = train(PICTURE, plain, encoding_all(seen.trace), seen, carrier)
    finally:
        carrier.close()
    assert differences(Training(PICTURE).run(plain, range(2)).outcome(), outcome) != []


# -- programs that change ------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Whatever is asked for, encode all that can be."""
    plans: list[Plan] = []

    def everything(
        _policy: str, trace: Trace, hardware: HardwareProfile, *_: Any, **__: Any
    ) -> Plan:
        plan = encoding_all(trace)
        seconds = simulate(trace, hardware, plan).seconds
        plans.append(replace(plan, predicted_seconds=seconds))
        return plans[-1]

    monkeypatch.setattr("belady.measure.verification.make_plan", everything)
    return plans


def changing(name: str) -> Step:
    """Train with an attribute of the model that is another one from some iteration on."""

    def step(training: Training, index: int) -> list[Tensor]:
        setattr(training.model, name, index < BEFORE)
        return plain(training, index)

    return step


@pytest.mark.parametrize("name", ["signs", "where"])
def test_another_branch_changes_no_bit(name: str, planned: list[Plan]) -> None:
    expected = Training(PICTURE).run(changing(name), range(BEFORE + 6)).outcome()
    training = Training(PICTURE)
    with belady.virtualize(training.models, ROOM):
        training.run(changing(name), range(BEFORE + 6))
    assert differences(expected, training.outcome()) == []
    assert codecs_of(planned[0]) == {"sign", "bits", "uint8"}


def test_a_write_after_the_save_is_noticed(planned: list[Plan]) -> None:
    training = Training(PICTURE)
    with belady.virtualize(training.models, ROOM):
        training.run(plain, range(BEFORE))
        assert planned
        setattr(training.model, "spoilt", True)  # noqa: B010
        with pytest.raises(StaleValueError):
            training.run(plain, [BEFORE])
        setattr(training.model, "spoilt", False)  # noqa: B010
        training.optimizer.zero_grad()
        training.run(plain, range(2))


def test_the_peak_is_the_predicted_one(planned: list[Plan]) -> None:
    training = Training(PICTURE)
    with belady.virtualize(training.models, ROOM) as vm:
        training.run(plain, range(BEFORE + 1))
        run = vm.run()
    assert run is not None
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) == run.predicted.peak(Tier.DEVICE)


class Branched(nn.Module):
    """A branch that is always computed, and in the loss from some iteration on."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8 if i else 3, 8, 3, padding=1) for i in (0, 1))
        self.weight, self.last = nn.Parameter(torch.randn(8, 1, 1)), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        beside = torch.zeros(())
        for convolution in self.convolutions:
            found = F.relu(convolution(x))
            beside = beside + (found * self.weight).sum()
            x = F.max_pool2d(found, 3, 1, 1)
        return self.last(x.mean((2, 3))), beside


def of_both(given: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(given[0], target)


BRANCHED = Task("branched", lambda: [Branched()], images, of_both)


def with_the_branch_later(training: Training, index: int) -> list[Tensor]:
    x, y = training.batch(index)
    found, beside = training.model(x)
    loss = F.cross_entropy(found, y)
    if index >= BEFORE:
        loss = loss + 1e-3 * beside
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def test_a_branch_that_the_loss_takes_in_later_finds_the_values(planned: list[Plan]) -> None:
    expected = Training(BRANCHED).run(with_the_branch_later, range(BEFORE + 4)).outcome()
    training = Training(BRANCHED)
    with belady.virtualize(training.models, ROOM):
        training.run(with_the_branch_later, range(BEFORE + 4))
    assert differences(expected, training.outcome()) == []
    # What the branch has saved is read in full one day; indices of poolings never change.
    assert codecs_of(planned[0]) == {"uint8"}
