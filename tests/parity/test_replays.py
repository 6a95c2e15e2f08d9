"""Values that are made again: the same bits, less memory, and nothing of the user's runs twice."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from belady.eager.replay import Recomputed
from belady.errors import PlanMismatchError, StaleValueError
from belady.ir.plan import Assignment, Budget, Decision, Keep, Offload, Plan, Recompute
from belady.ir.replay import sources
from belady.ir.trace import Tier, Trace
from belady.measure.recipes import Recipe
from belady.planners.replays import cheapest
from tests.parity.racing import ROOM, Observed, hostile_carrier, legal, observed, train
from tests.parity.test_random_plans import step_of
from tests.support.models import CNN, GAN, GPT, INCEPTION, LSTM, Task
from tests.support.training import Step, Training, accumulating, differences, plain, twice_backward

RECOMPUTING = (CNN, GPT, INCEPTION, LSTM, GAN)
KINDS = ["direct", "threads", pytest.param("cuda", marks=pytest.mark.gpu)]


@functools.cache
def seen_of(task: Task, step: Step, device: str) -> Observed:
    return observed(task, step, device)


@functools.cache
def expected(task: Task, step: Step, device: str) -> dict[str, Tensor]:
    return Training(task, device).run(step, range(2)).outcome()


def all_replayed(trace: Trace, others: Tier | None) -> Plan:
    """Make again what can be made again, and move or keep all else."""

    def decision(index: int) -> Decision:
        replay = cheapest(trace, index)
        if replay is not None:
            return replay
        value = trace.values[index]
        first, last = value.first_save, value.first_read
        if others is None or last is None or not trace.storages[value.storage].nbytes:
            return Keep()
        return Offload(others, first - 1, first, first, last)

    assignments = tuple(Assignment(index, decision(index)) for index in trace.saved)
    return legal(trace, Plan(trace.fingerprint, "replays/1", Budget(ROOM), assignments))


def all_nested(trace: Trace) -> Plan:
    """Make everything again that can be, each value from those before it, made again or not."""
    made = {index: replay for index in trace.saved if (replay := cheapest(trace, index))}
    for index in sorted(made, key=lambda index: -made[index].ops[-1]):
        for source in sources(trace, made[index]):
            if source in made:
                at = min(made[source].at, made[index].at)
                made[source] = replace(made[source], at=at)
    assignments = tuple(Assignment(index, replay) for index, replay in made.items())
    return legal(trace, Plan(trace.fingerprint, "replays/1", Budget(ROOM), assignments))


def replayed(plan: Plan) -> int:
    return sum(isinstance(decision, Recompute) for decision in plan.decisions.values())


def damage(task: Task, step: Step, kind: str, *, moved: bool) -> tuple[list[str], int]:
    tier = Tier.DISK if kind == "direct" else Tier.HOST
    seen = seen_of(task, step, "cuda" if kind == "cuda" else "cpu")
    return damage_of(all_replayed(seen.trace, tier if moved else None), task, step, kind)


def damage_of(plan: Plan, task: Task, step: Step, kind: str) -> tuple[list[str], int]:
    device = "cuda" if kind == "cuda" else "cpu"
    seen = seen_of(task, step, device)
    carrier = hostile_carrier(kind)
    try:
        outcome, engine = train(task, step, plan, seen, carrier)
    finally:
        carrier.close()
    assert not engine.defaults
    return differences(expected(task, step, device), outcome), replayed(plan)


@pytest.mark.parametrize("moved", [False, True], ids=["rest kept", "rest moved"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", RECOMPUTING, ids=str)
def test_replays_change_no_bit(task: Task, kind: str, moved: bool) -> None:
    wrong, count = damage(task, step_of(task), kind, moved=moved)
    assert wrong == []
    # cuDNN runs a recurrent layer as one op, which nothing makes again.
    assert count > 0 or (task, kind) == (LSTM, "cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [accumulating, twice_backward], ids=lambda step: step.__name__)
def test_replays_of_several_passes_change_no_bit(step: Step, kind: str) -> None:
    wrong, count = damage(CNN, step, kind, moved=True)
    assert wrong == []
    assert count > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", RECOMPUTING, ids=str)
def test_replays_that_start_from_replays_change_no_bit(task: Task, kind: str) -> None:
    step = step_of(task)
    plan = all_nested(seen_of(task, step, "cuda" if kind == "cuda" else "cpu").trace)
    wrong, count = damage_of(plan, task, step, kind)
    assert wrong == []
    alone = all_replayed(seen_of(task, step, "cuda" if kind == "cuda" else "cpu").trace, None)
    # The gates of an LSTM all start from what is kept.
    assert count > replayed(alone) or task is LSTM


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(400):
            x = torch.sigmoid(x)
        return self.last(x)


def test_a_long_row_of_replays_is_no_deep_recursion() -> None:
    task = Task("deep", lambda: [Deep()], rows)
    wrong, count = damage_of(all_nested(seen_of(task, plain, "cpu").trace), task, plain, "direct")
    assert wrong == []
    assert count >= 400


def zeroed(self: Recipe, tensor_of: object) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(tensor) for tensor in RUN(self, tensor_of))


RUN = Recipe.run


def test_a_wrong_replay_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_of(CNN, step_of(CNN), "cpu")
    monkeypatch.setattr(Recipe, "run", zeroed)
    with pytest.raises(PlanMismatchError, match="policy='lifetime'"):
        damage(CNN, step_of(CNN), "direct", moved=False)


class Annealed(torch.nn.Module):
    """Multiplies by a number that a training loop changes."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        # The product is saved, and made again from the input.
        return self.last(self.first(x) * self.scale)


def rows(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (size,), generator=generator)
    return torch.randn(size, 64, generator=generator), labels


ANNEALED = Task("annealed", lambda: [Annealed()], rows)


def test_a_number_that_changes_is_an_error_and_not_a_wrong_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong, count = damage(ANNEALED, plain, "direct", moved=False)
    assert wrong == []
    assert count > 0
    monkeypatch.setattr(Annealed, "scale", 2.0)
    with pytest.raises(PlanMismatchError, match="gradients of this backward are wrong"):
        damage(ANNEALED, plain, "direct", moved=False)


def test_an_input_changed_in_place_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[Tensor] = []

    def spoil(self: Recomputed) -> Tensor:
        for owner in self._chain.owned.values():
            tensor = owner()
            assert tensor is not None
            with torch.no_grad():
                tensor.add_(1.0)
            changed.append(tensor)
        return TAKE(self)

    seen_of(CNN, step_of(CNN), "cpu")
    monkeypatch.setattr(Recomputed, "take", spoil)
    # What plain PyTorch needs too says so first, in plain PyTorch's words.
    with pytest.raises((PlanMismatchError, StaleValueError), match=r"in ?place"):
        damage(CNN, step_of(CNN), "direct", moved=False)
    assert changed


TAKE = Recomputed.take
