"""Any legal plan gives the same bits, with late copies and memory that is reused at once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor

from belady.eager.planned import Planned
from belady.errors import PlanMismatchError
from belady.memory.contents import Moved
from belady.memory.parcels import HostParcel
from tests.parity.racing import (
    Observed,
    ReusingLanes,
    hostile_carrier,
    observed,
    random_plan,
    train,
)
from tests.support.models import CNN, GAN, TASKS, Task
from tests.support.training import Step, Training, accumulating, differences, plain, twice_backward

SEEDS = range(3)


def together(training: Training, index: int) -> list[Tensor]:
    """Both adversaries in one iteration of three passes, so that one trace has it all."""
    generator, critic = training.models
    noise, real = training.batch(index)
    fake = generator(noise)
    critic_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
    critic_loss.backward()
    generator_loss = F.softplus(-critic(fake)).mean()
    generator_loss.backward()
    for optimizer in training.optimizers:
        optimizer.step()
    for optimizer in training.optimizers:
        optimizer.zero_grad()
    return [critic_loss, generator_loss]


def step_of(task: Task) -> Step:
    return together if task is GAN else plain


@functools.cache
def seen_of(task: Task, step: Step, device: str) -> Observed:
    return observed(task, step, device)


@functools.cache
def expected(task: Task, step: Step, device: str) -> dict[str, Tensor]:
    return Training(task, device).run(step, range(2)).outcome()


def damage(task: Task, step: Step, kind: str, seed: int) -> tuple[list[str], Planned]:
    """What differs from plain PyTorch under a random plan, and the engine that did it."""
    device = "cuda" if kind == "cuda" else "cpu"
    seen = seen_of(task, step, device)
    carrier = hostile_carrier(kind)
    plan = random_plan(seen.trace, kind, seed)
    try:
        outcome, engine = train(task, step, plan, seen, carrier)
        moved = sum(it.copies for it in carrier.counters.values())
        assert moved > 0
    finally:
        carrier.close()
    wrong = differences(expected(task, step, device), outcome)
    lanes = carrier._lanes
    if isinstance(lanes, ReusingLanes):
        wrong += ["memory of others overwritten"] * lanes.overwritten
    return wrong, engine


KINDS = ["direct", "threads", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", TASKS, ids=str)
def test_random_plan_changes_no_bit(task: Task, kind: str, seed: int) -> None:
    wrong, engine = damage(task, step_of(task), kind, seed)
    assert wrong == []
    assert set(engine.defaults) <= {"encoding gains nothing"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [accumulating, twice_backward], ids=lambda step: step.__name__)
def test_random_plan_of_several_passes_changes_no_bit(step: Step, kind: str, seed: int) -> None:
    wrong, engine = damage(CNN, step, kind, seed)
    assert wrong == []
    assert set(engine.defaults) <= {"encoding gains nothing"}


# -- mistakes that an engine could make, and that must be noticed here ----------------------------


def takes_without_waiting(self: Moved) -> Tensor:
    if self.source is not None:
        return self.source
    if self.here is None:
        self.bring()
        assert self.arrival is not None
        self.here, self.arrival = self.arrival.tensor, None
    return self.here


def frees_without_waiting(self: HostParcel) -> None:
    self._source = None


@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [
        (Moved, "take", takes_without_waiting),
        (HostParcel, "wait_sent", frees_without_waiting),
    ],
    ids=["take", "free"],
)
def test_a_wait_left_out_is_noticed(
    owner: type, name: str, mistake: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in SEEDS:
        assert damage(CNN, plain, "threads", seed)[0] == []
    monkeypatch.setattr(owner, name, mistake)
    for seed in SEEDS:
        assert noticed(seed)


def noticed(seed: int) -> bool:
    """Whether bits differ, or a replay whose inputs are damaged says so first."""
    try:
        return damage(CNN, plain, "threads", seed)[0] != []
    except PlanMismatchError:
        return True
