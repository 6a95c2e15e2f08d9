"""Any legal plan of a captured graph gives plain PyTorch's bits, however late the copies are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from belady.ir.plan import Budget, Decision, Encode, Plan, Recompute
from belady.ir.trace import Trace
from belady.measure.probe import probe
from belady.memory.contents import Moved
from belady.memory.parcels import HostParcel
from belady.planners import plan as make_plan
from belady.planners import smallest_budget
from tests.parity.graphs import PlannedHost, compiled
from tests.parity.racing import ROOM, ReusingLanes, hostile_carrier, random_plan
from tests.support.models import CNN, GAN, GPT, INCEPTION, TIED, Task
from tests.support.training import (
    Step,
    Training,
    abandoning,
    accumulating,
    adversarial,
    autocast,
    differences,
    evaluating,
    plain,
    short_at_the_end,
    twice_backward,
)

CAPTURED = (CNN, GPT, INCEPTION, TIED, GAN)


def step_of(task: Task) -> Step:
    return adversarial if task is GAN else plain


@functools.cache
def expected(task: Task, step: Step, device: str, count: int) -> dict[str, Tensor]:
    return Training(task, device).run(step, range(count)).outcome()


Choice = tuple[str, Callable[[Trace], Plan]]


def damage(task: Task, step: Step, choices: Sequence[Choice]) -> tuple[list[str], PlannedHost]:
    """What differs from plain PyTorch when each iteration runs under another carrier and plan."""
    device = "cuda" if choices[0][0] == "cuda" else "cpu"
    training = Training(task, device)
    carriers = [hostile_carrier(kind) for kind, _ in choices]
    host = PlannedHost(training.models, carriers[0], choices[0][1])
    try:
        with compiled(training, host):
            for index, (carrier, (_, choose)) in enumerate(zip(carriers, choices, strict=True)):
                host.replan(carrier, choose)
                training.run(step, [index])
    finally:
        for carrier in carriers:
            carrier.close()
    wrong = differences(expected(task, step, device, len(choices)), training.outcome())
    for carrier in carriers:
        if isinstance(carrier._lanes, ReusingLanes):
            wrong += ["memory of others overwritten"] * carrier._lanes.overwritten
    assert host.plans
    assert host.reasons == []
    return wrong, host


def at_random(*kinds: str) -> list[Choice]:
    """A random plan for each iteration; one graph is captured once and planned each time."""

    def chooser(kind: str, seed: int) -> Callable[[Trace], Plan]:
        return lambda trace: random_plan(trace, kind, seed)

    return [(kind, chooser(kind, seed)) for seed, kind in enumerate(kinds)]


def decisions(host: PlannedHost) -> list[Decision]:
    return [decision for plan in host.plans for decision in plan.decisions.values()]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "kinds",
    [
        ["direct", "threads", "direct", "threads"],
        pytest.param(["cuda"] * 6, marks=pytest.mark.gpu),
    ],
    ids=["cpu", "cuda"],
)
@pytest.mark.parametrize("task", CAPTURED, ids=str)
def test_plans_that_change_from_one_iteration_to_the_next_change_no_bit(
    task: Task, kinds: list[str]
) -> None:
    wrong, host = damage(task, step_of(task), at_random(*kinds))
    assert wrong == []
    assert all(plan.decisions for plan in host.plans)
    if task is CNN:
        assert any(isinstance(it, Recompute) and len(it.ops) > 1 for it in decisions(host))
        assert any(isinstance(it, Encode) for it in decisions(host))


@pytest.mark.parametrize(
    "step",
    [autocast, accumulating, twice_backward, evaluating, abandoning],
    ids=lambda step: step.__name__,
)
def test_random_plan_changes_no_bit_however_people_train(step: Step) -> None:
    wrong, _ = damage(CNN, step, at_random("threads", "direct"))
    assert wrong == []


def test_a_batch_of_another_size_has_a_graph_and_a_plan_of_its_own() -> None:
    wrong, host = damage(CNN, short_at_the_end, at_random(*["direct"] * 5))
    assert wrong == []
    assert len(host.drawn) == 2


def at_the_smallest_budget(policy: str) -> Callable[[Trace], Plan]:
    def choose(trace: Trace) -> Plan:
        machine = probe(trace.device)
        least = smallest_budget(policy, trace, machine, Budget(ROOM))
        return make_plan(policy, trace, machine, Budget(least))

    return choose


@pytest.mark.parametrize("task", [CNN, GPT], ids=str)
def test_no_policy_changes_a_bit(task: Task) -> None:
    policies = ["lifetime", "hybrid", "floor", "vdnn_all", "vdnn_conv"]
    wrong, host = damage(task, plain, [("direct", at_the_smallest_budget(it)) for it in policies])
    assert wrong == []
    moving = [plan.planner.partition("/")[0] for plan in host.plans if plan.decisions]
    assert moving == (policies if task is CNN else ["lifetime", "hybrid", "floor", "vdnn_all"])
    assert any(isinstance(it, Recompute) for it in decisions(host))


# -- mistakes that an engine could make, and that must be noticed here ----------------------------


def takes_without_waiting(self: Moved) -> Tensor:
    if self.source is not None:
        return self.source
    self.bring()
    assert self.arrival is not None
    return self.arrival.tensor


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
    choices = at_random("threads", "threads")
    assert damage(CNN, plain, choices)[0] == []
    monkeypatch.setattr(owner, name, mistake)
    assert damage(CNN, plain, choices)[0] != []
