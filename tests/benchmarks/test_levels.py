"""Iterations at two levels, in turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import belady
from belady.measure.monitor import Monitor
from benchmarks import levels


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_levels_take_turns_under_a_plan_that_stays(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    begun, begin = list[int](), Monitor.begin

    def noted(self: Monitor, *args: Any, **kwargs: Any) -> Any:
        sample = begin(self, *args, **kwargs)
        begun.append(self._level)
        return sample

    with belady.virtualize(model, "1GiB", policy="vdnn_all", engine=engine) as vm:

        def iterate(count: int) -> None:
            for _ in range(count):
                model(torch.ones(2, 3, 12, 12)).sum().backward()

        iterate(16)
        before = vm.run()
        monkeypatch.setattr(Monitor, "begin", noted)
        found = levels.in_turn(vm, iterate)
        iterate(2)
        after = vm.run()
    row = [0] * 11 + [1] * 11
    assert begun == [0, *row * 3, 0, 0]
    assert [len(it) for it in found["level_rows"].values()] == [3, 3]
    assert before is not None
    assert after is not None
    assert (after.plan, after.measured) == (before.plan, before.measured)


def test_of_launches_and_of_what_takes_long_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(run: Any) -> dict[str, Any]:
        return levels.in_turn(cast("Any", SimpleNamespace(run=lambda: run)), ran.append)

    ran = list[int]()
    assert of(None) == of(SimpleNamespace(measured=None)) == {}
    assert of(SimpleNamespace(measured=SimpleNamespace(launched=True))) == {}
    assert ran == []
    monkeypatch.setattr(levels, "_MOST_S", 0.0)
    assert of(SimpleNamespace(measured=SimpleNamespace(launched=False))) == {}
    assert ran == [1]
