"""Parity is promised for the same kernels, so these are the deterministic ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Assignment, Budget, Plan
from belady.ir.trace import Trace
from belady.simulate import simulate
from tests.parity.racing import every_replay
from tests.support.training import repeatable


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with repeatable():
        yield


@pytest.fixture
def captures() -> Iterator[None]:
    """Nothing that was captured before is known, and nothing of this test is afterwards."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def few_mixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is as legal, and as hard to carry out, after 40 mixes as after 300.

    As many as let the search go every way that it knows. How fast the plans are that it finds is
    what `unit/planners` and `conformance` look at.
    """
    monkeypatch.setattr("belady.planners.hybrid._MOST", 40)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Whatever is asked for, make again what can be made again."""
    plans: list[Plan] = []

    def everything(
        _policy: str, trace: Trace, hardware: HardwareProfile, *_: Any, **__: Any
    ) -> Plan:
        made = tuple(Assignment(value, replay) for value, replay in every_replay(trace).items())
        plan = Plan(trace.fingerprint, "replays/1", Budget(1 << 30), made)
        seconds = simulate(trace, hardware, plan).seconds
        plans.append(replace(plan, predicted_seconds=seconds))
        return plans[-1]

    monkeypatch.setattr("belady.measure.verification.make_plan", everything)
    return plans
