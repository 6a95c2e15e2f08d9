"""What users are told of iterations that might be launched, and are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import belady
from belady.graph import launching, planning, prospect, told
from belady.ir.timeline import Measured
from belady.measure.verification import Verification
from tests.parity.test_graph_launched import CNN
from tests.support.launches import WAYS, Rerun, launching_on_a_cpu
from tests.support.training import Training, plain, repeatable


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes of the report that are of launches."""
    training = Training(CNN)
    launching_on_a_cpu(monkeypatch, training.models)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph") as vm:
        training.run(plain, range(40))
        run = vm.run()
        assert run is not None
        notes = [it for it in run.notes if it.startswith((told.ISSUED, told.NOTE))]
        assert all(note in vm.report() for note in notes)
    return notes


def test_what_is_launched_is_not_said_to_be_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = said(monkeypatch)
    assert note.startswith(told.NOTE)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (torch.OutOfMemoryError("full"), prospect.NO_ROOM),
        (RuntimeError("no such luck\nat all"), "no such luck"),
        (belady.TierFullError("host memory is full"), "host memory is full"),
    ],
)
def test_what_cannot_be_captured(
    error: RuntimeError, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Rerun, issue: Any) -> Any:
        raise error

    monkeypatch.setattr(Rerun, "capture", fails)
    assert said(monkeypatch) == [f"{told.ISSUED}: {why}"]


def test_what_no_graph_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "why_not", lambda *_: "it is not on one device")
    assert said(monkeypatch) == [f"{told.ISSUED}: it is not on one device"]


def test_what_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "gains", lambda *_: False)
    (note,) = said(monkeypatch)
    assert note.startswith(f"{told.ISSUED}: launched they take ")


def test_what_does_not_keep_to_the_budget() -> None:
    def of(retries: int, reserved: int) -> str:
        found = Measured(0, 0.008, (0.008,), (), reserved, allocation_retries=retries)
        return told.gained_nothing(found, Measured(0, 0.011, (0.011,), ()), 3 << 30)

    assert "flushed its cache" in of(1, 1 << 30)
    assert of(0, 5 << 30) == "launched they take 5.00 GiB, more than the budget of 3.00 GiB"
    assert "8.00 ms" in of(0, 1 << 30)


def test_what_other_iterations_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although there was no room for a capture at first."""
    training, failed = Training(CNN), list[int]()
    made, capture = launching_on_a_cpu(monkeypatch, training.models), Rerun.capture

    def full(self: Rerun, issue: Any) -> Any:
        if len(failed) < WAYS:
            failed.append(1)
            raise torch.OutOfMemoryError("full")
        return capture(self, issue)

    monkeypatch.setattr(Rerun, "capture", full)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph") as vm:
        for index in range(150):
            training.run(plain, [index])
            if made and made[-1].launched > 4:
                made.clear()
                vm._tracker.conductor.launching.rest()
        run = vm.run()
    assert run is not None
    assert f"{told.ISSUED}: {prospect.OTHERS}" in run.notes


@pytest.mark.parametrize("late", [True, False])
def test_where_no_plan_leaves_it_room(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **_named: Any) -> Any:
        sizes = {"needed_bytes": 2, "budget_bytes": 1, "smallest_bytes": 2}
        raise belady.InfeasibleBudgetError(**sizes, op="aten.relu.default", module="0")

    monkeypatch.setattr(Verification, "launched", never)
    monkeypatch.setattr(planning, "gains", lambda *_: late)
    monkeypatch.setattr(planning, "loses", lambda *_: True)
    # Where the host is never late nobody misses it.
    assert said(monkeypatch) == [f"{told.ISSUED}: {prospect.NO_FASTER}"] * late
