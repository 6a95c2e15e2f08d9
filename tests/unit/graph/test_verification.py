"""A plan of captured graphs that goes otherwise than predicted is corrected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import belady
from belady.errors import InfeasibleBudgetError
from belady.graph.kinds import Kind
from belady.graph.prospect import Prospect, Way
from belady.graph.session import Session
from belady.ir.run import Run
from belady.ir.timeline import Measured, TierPeak
from belady.ir.trace import Tier
from belady.measure import progress
from belady.measure.stages import Stage
from belady.virtual import VirtualMemory
from tests.support.models import CNN
from tests.support.training import Training, differences, plain, repeatable

ITERATIONS = range(18)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


def smallest() -> int:
    model = Training(CNN).model
    with (
        pytest.raises(InfeasibleBudgetError) as refusal,
        belady.virtualize(model, 1, policy="lifetime", engine="graph"),
    ):
        model(torch.randn(8, 3, 16, 16))
    return refusal.value.smallest_bytes


def trained(measured: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Kind, Run]:
    """Train under a plan of which ``measured`` says what was measured."""
    real = progress.summarize
    monkeypatch.setattr(progress, "summarize", lambda *given: measured(real(*given)))
    expected, budget = Training(CNN).run(plain, ITERATIONS), int(smallest() * 1.2)
    training = Training(CNN)
    with belady.virtualize(training.models, budget, policy="lifetime", engine="graph") as vm:
        training.run(plain, ITERATIONS)
    assert differences(expected.outcome(), training.outcome()) == []
    run = vm.run()
    assert run is not None
    return kind_of(vm), run


def kind_of(vm: VirtualMemory) -> Kind:
    session = vm._tracker.conductor
    assert isinstance(session, Session)
    (kind,) = session._kinds.values()
    return kind


def test_a_plan_that_goes_as_predicted_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, run = trained(lambda measured: measured, monkeypatch)
    assert kind.stage is Stage.STEADY
    assert len(kind.tried) == 1
    assert run.notes == ()
    assert run.plan.decisions


def test_what_the_allocator_repeats_gets_more_room_three_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter([4.0, 1.0, 3.0, 2.0])

    def starved(measured: Measured) -> Measured:
        took = next(seconds)
        return replace(measured, allocation_retries=5, seconds=took, iterations=(took, took))

    kind, run = trained(starved, monkeypatch)
    assert kind.stage is Stage.STEADY
    margins = [trial.hardware.allocator.margin_fraction for trial in kind.tried]
    assert margins == sorted(set(margins))
    assert 1 < len(margins) <= 4
    assert run.plan == kind.tried[1].plan
    assert run.measured is not None
    assert run.measured.seconds == 1.0
    # Where more were tried, that this one goes on is told as well.
    returned = kind.tried[-1] is not kind.tried[1]
    assert sum("it goes on" in note for note in run.notes) == returned
    assert all("flush" in note for note in run.notes)


def test_a_peak_above_the_budget_is_answered_with_a_leaner_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    excess = 16 << 10

    def higher(measured: Measured) -> Measured:
        return replace(
            measured, peaks=(TierPeak(Tier.DEVICE, measured.peak(Tier.DEVICE) + excess),)
        )

    kind, run = trained(higher, monkeypatch)
    first, second = kind.tried[:2]
    assert second.plan.predicted_peak_bytes < first.plan.predicted_peak_bytes
    assert not first.keeps()
    assert run.plan != first.plan
    assert "were predicted: tried with a margin larger by the difference" in run.notes[0]


def test_a_plan_that_waits_to_be_replaced_is_not_verified_again() -> None:
    kind = Kind()
    assert kind.issued
    # After a launch that was not worth it, until the next iteration begins.
    kind.prospect.instead = cast(Any, object())
    assert not kind.issued
    kind.prospect = Prospect(way=Way.TRIED)
    assert not kind.issued
