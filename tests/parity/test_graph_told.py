"""What users are told of iterations that might be launched, and are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import belady
from belady.graph import launching, planning, told
from belady.measure.verification import Verification
from tests.parity.test_graph_launched import CNN
from tests.support.launches import Rerun, launching_on_a_cpu
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
    [(torch.OutOfMemoryError("full"), told.NO_ROOM), (RuntimeError("no"), told.NOT_CAPTURED)],
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
    assert note.startswith(f"{told.ISSUED}: launched it took ")


@pytest.mark.parametrize("late", [True, False])
def test_where_no_plan_leaves_it_room(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **_named: Any) -> Any:
        sizes = {"needed_bytes": 2, "budget_bytes": 1, "smallest_bytes": 2}
        raise belady.InfeasibleBudgetError(**sizes, op="aten.relu.default", module="0")

    monkeypatch.setattr(Verification, "launched", never)
    monkeypatch.setattr(planning, "gains", lambda *_: late)
    monkeypatch.setattr(planning, "loses", lambda *_: True)
    # Where the host is never late nobody misses it.
    assert said(monkeypatch) == [f"{told.ISSUED}: {told.NO_FASTER}"] * late
