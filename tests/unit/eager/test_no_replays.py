"""The report says where nothing is recomputed or encoded because of what else the process does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import belady

TIGHT, ROOM = 5 << 19, 1 << 30
SAID = "nothing is recomputed or encoded"


def compiled(_: pytest.MonkeyPatch) -> None:
    torch.compile(torch.relu, backend="eager")(torch.ones(2))


def among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)


def alone(_: pytest.MonkeyPatch) -> None:
    pass


def said(budget: int, policy: str, engine: str = "eager") -> list[str]:
    torch.manual_seed(0)
    layers = [it for _ in range(4) for it in (nn.Linear(128, 128), nn.Tanh(), nn.ReLU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with belady.virtualize(model, budget, policy=policy, engine=engine) as vm:
        for _ in range(5):
            model(torch.ones(512, 128)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        run, report = vm.run(), vm.report()
    assert run is not None
    assert run.plan.moves_nothing == (budget == ROOM)
    found = [note for note in run.notes if SAID in note]
    assert all(note in report for note in found)
    return found


@pytest.mark.parametrize("policy", ["hybrid", "auto"])
@pytest.mark.parametrize(
    ("meanwhile", "why"), [(compiled, "torch.compile"), (among_others, "torch.distributed")]
)
def test_it_is_said_with_what_to_do(
    meanwhile: Callable[[pytest.MonkeyPatch], None],
    why: str,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meanwhile(monkeypatch)
    (note,) = said(TIGHT, policy)
    assert f"since {why} " in note
    assert "engine='graph' can" in note


@pytest.mark.parametrize(
    ("meanwhile", "budget", "policy", "engine"),
    [
        (alone, TIGHT, "hybrid", "eager"),
        (compiled, TIGHT, "lifetime", "eager"),
        (compiled, ROOM, "auto", "eager"),
        (compiled, TIGHT, "hybrid", "graph"),
    ],
    ids=["alone", "never recomputes", "everything fits", "graph"],
)
def test_nothing_is_said_where_nothing_is_lost(
    meanwhile: Callable[[pytest.MonkeyPatch], None],
    budget: int,
    policy: str,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meanwhile(monkeypatch)
    assert said(budget, policy, engine) == []
