"""Replays that take a cheaper way than the op did, where that gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.ir.plan import Plan, Recompute
from belady.ir.run import Run
from belady.measure.recipes import Recipe
from tests.support.models import Task
from tests.support.training import Training, differences, plain

ITERATIONS = range(5)
SIGMOID, NORM = "aten.sigmoid.default", "aten.native_batch_norm.default"


def instead(func: Any) -> Callable[..., Recipe | None]:
    def shortcut(recipe: Recipe, result: Tensor, value_of: Callable[[Tensor], int]) -> Any:
        if str(recipe.func) != SIGMOID:
            return None
        return Recipe(func, recipe.args, {}, (value_of(result),))

    return shortcut


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.last = nn.Conv2d(16, 10, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).sigmoid()).flatten(1)


def images(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (size,), generator=generator)
    return torch.randn(size, 3, 32, 32, generator=generator), labels


GATE = Task("gate", lambda: [Gate()], images)


def trained(device: str) -> Run:
    expected = Training(GATE, device).run(plain, ITERATIONS).outcome()
    training = Training(GATE, device)
    with belady.virtualize(training.models, "1GiB") as vm:
        training.run(plain, ITERATIONS)
        run = vm.run()
    assert differences(expected, training.outcome()) == []
    assert run is not None
    assert run.measured is not None
    assert run.measured.defaults == ()
    return run


def shortcuts(run: Run, name: str) -> list[Any]:
    return [op.shortcut for op in run.trace.ops if op.name == name and op.replayable]


def test_a_cheaper_way_to_the_same_bits_is_taken(
    replaying: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    take = Recipe.run

    def run(self: Recipe, tensor_of: Any) -> Any:
        ran.append(str(self.func))
        return take(self, tensor_of)

    monkeypatch.setattr(
        "belady.measure.trials.shortcut", instead(torch.ops.aten.special_expit.default)
    )
    monkeypatch.setattr(Recipe, "run", run)
    found = trained("cpu")
    (short,) = shortcuts(found, SIGMOID)
    assert short.device_seconds > 0
    assert "aten.special_expit.default" in ran
    assert any(isinstance(it, Recompute) for it in found.plan.decisions.values())


def test_a_cheaper_way_to_other_bits_is_not_taken(
    replaying: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belady.measure.trials.shortcut", instead(torch.ops.aten.tanh.default))
    assert shortcuts(trained("cpu"), SIGMOID) == [None]


def test_a_norm_is_made_again_from_its_statistics(replaying: list[Plan], device: str) -> None:
    run = trained(device)
    assert any(isinstance(it, Recompute) for it in run.plan.decisions.values())
    found = [op for op in run.trace.ops if "batch_norm" in op.name and op.replayable]
    assert len(found) == 1
    if found[0].name == NORM and device == "cuda":
        # The kernel that a CPU lacks.
        short = found[0].shortcut
        assert short is not None
        assert short.device_seconds < found[0].device_seconds
        assert set(short.reads) >= set(found[0].writes[1:])
