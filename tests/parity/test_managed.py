"""Values in managed memory: plain PyTorch's bits, wherever the pages are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.errors import InfeasibleBudgetError, PlanMismatchError
from belady.graph.orders import orders_of
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Assignment, Budget, Managed, Plan
from belady.ir.residency import next_anchor
from belady.ir.run import Run
from belady.ir.timeline import Lane
from belady.ir.trace import Tier, Trace
from belady.memory.contents import Paged
from belady.memory.paging import ManagedParcel
from belady.planners import plan as make_plan
from belady.planners.moves import movable, read_by
from belady.simulate import simulate
from tests.parity.racing import Observed, observed, train
from tests.support.managed import ManagedCarrier, TwoSided, random_managed_plan
from tests.support.memory import ThreadLanes
from tests.support.models import CNN, GPT, Task
from tests.support.training import (
    Step,
    Training,
    accumulating,
    autocast,
    differences,
    plain,
    twice_backward,
)

SEEDS = range(3)
SECONDS = 0.0005
MIB = 2**20
POLICIES = ("ocdnn_opt", "ocdnn_naive")


@functools.cache
def seen_of(task: Task, step: Step) -> Observed:
    return observed(task, step, "cpu")


@functools.cache
def expected(task: Task, step: Step, device: str, iterations: int) -> dict[str, Tensor]:
    return Training(task, device).run(step, range(iterations)).outcome()


def damage(task: Task, step: Step, seed: int, *, faults: bool) -> list[str]:
    """What differs from plain PyTorch under a random plan with late movements."""
    seen = seen_of(task, step)
    lanes = ThreadLanes(SECONDS)
    carrier = ManagedCarrier(lanes, TwoSided(faults=faults))
    plan = random_managed_plan(seen.trace, seed, faults=faults)
    try:
        outcome, engine = train(task, step, plan, seen, carrier)
        assert carrier.counters[Lane.COPY_OUT].copies > 0
        assert not engine.defaults
    finally:
        carrier.close()
    return differences(expected(task, step, "cpu", 2), outcome)


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("task", [CNN, GPT], ids=str)
def test_random_managed_plan_changes_no_bit(task: Task, seed: int, faults: bool) -> None:
    assert damage(task, plain, seed, faults=faults) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("step", [accumulating, twice_backward], ids=lambda step: step.__name__)
def test_of_several_passes_too(step: Step, seed: int) -> None:
    assert damage(CNN, step, seed, faults=False) == []


def takes_without_waiting(self: Paged) -> Tensor:
    if self.source is not None:
        return self.source
    self.bring()
    assert self.arrival is not None
    return self.arrival.tensor


def never_brings(self: ManagedParcel) -> Any:
    self._faults = True
    return FETCH(self)


FETCH = ManagedParcel._fetch


@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [(Paged, "take", takes_without_waiting), (ManagedParcel, "_fetch", never_brings)],
    ids=["take", "fetch"],
)
def test_a_movement_or_wait_left_out_is_noticed(
    owner: type, name: str, mistake: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    assert damage(CNN, plain, 0, faults=False) != []


# -- where there is no managed memory ------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cpu_trains_as_long_as_everything_fits(policy: str) -> None:
    training = Training(CNN)
    with belady.virtualize(training.models, "1GiB", policy=policy) as vm:
        training.run(plain, range(4))
        run = vm.run()
    assert run is not None
    assert run.plan.moves_nothing
    assert differences(expected(CNN, plain, "cpu", 4), training.outcome()) == []
    with (
        belady.virtualize(training.models, 4096, policy=policy),
        pytest.raises(InfeasibleBudgetError) as refused,
    ):
        training.run(plain, [0])
    assert "is a CPU, and managed memory takes a CUDA device" in refused.value.__notes__[0]


@pytest.mark.parametrize("engine", ["graph", "inductor", "auto"])
@pytest.mark.parametrize("policy", POLICIES)
def test_graphs_refuse_managed_memory(policy: str, engine: str) -> None:
    with pytest.raises(ValueError, match="moves values in managed memory, which engine="):
        belady.virtualize(nn.Linear(2, 2), "1GiB", policy=policy, engine=engine)


def test_a_managed_plan_for_graphs_is_refused() -> None:
    trace = seen_of(CNN, plain).trace
    plan = random_managed_plan(trace, 0, faults=False)
    drawn: Any = SimpleNamespace(trace=trace, values=[])
    with pytest.raises(PlanMismatchError, match="graphs move nothing in managed memory"):
        orders_of(drawn, plan)


# -- on a GPU ------------------------------------------------------------------------------------


def everything_managed(policy: str, trace: Trace) -> Plan:
    """All that may move does: prefetched an anchor early, or left to the driver."""
    faults = policy == "ocdnn_naive"
    made = []
    for index in movable(trace):
        value = trace.values[index]
        out = next_anchor(trace, max(value.first_save, trace.storages[value.storage].released))
        gone = out if faults else next_anchor(trace, out + 1)
        read = read_by(value)
        early = max([anchor for anchor in trace.anchors if anchor < read], default=read)
        back = read if faults else max(early, gone)
        if gone < back:
            made.append(Assignment(index, Managed(out, gone, back, read, faults), "moved: all is"))
    return Plan(trace.fingerprint, f"{policy}/1", Budget(1 << 40), tuple(made))


@pytest.fixture
def managing(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(
        policy: str, trace: Trace, hardware: HardwareProfile, budget: Budget, **_: Any
    ) -> Plan:
        plan = replace(everything_managed(policy, trace), budget=budget)
        return replace(plan, predicted_seconds=simulate(trace, hardware, plan).seconds)

    monkeypatch.setattr("belady.measure.verification.make_plan", everything)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [plain, autocast, accumulating, twice_backward])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("task", [CNN, GPT], ids=str)
def test_all_in_managed_memory_changes_no_bit(
    task: Task, policy: str, step: Step, managing: None
) -> None:
    training = Training(task, "cuda")
    with belady.virtualize(training.models, "8GiB", policy=policy) as vm:
        training.run(step, range(6))
        run = vm.run()
        assert vm._tracker.conductor is not None
        paging = vm._tracker.conductor.carrier.paging
        assert paging.block_bytes > 0
    assert run is not None
    assert any(isinstance(it, Managed) for it in run.plan.decisions.values())
    assert moved(run, Lane.COPY_OUT) > 0
    torch.cuda.synchronize()
    assert differences(expected(task, step, "cuda", 6), training.outcome()) == []
    del training
    assert paging.block_bytes == 0


def moved(run: Run, lane: Lane) -> int:
    assert run.measured is not None
    return sum(it.nbytes for it in run.measured.moved if it.lane is lane)


class Deep(nn.Module):
    """Convolutions whose outputs of 64 MiB each are 1.5 GiB in all."""

    def __init__(self, layers: int = 24) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(layers))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


def deep_run(policy: str | None, budget: int = 0) -> tuple[list[Tensor], Run | None, bool | None]:
    torch.manual_seed(0)
    model = Deep().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(16, 64, 128, 128, generator=torch.Generator().manual_seed(1)).cuda()
    losses = []

    def iterate() -> None:
        # Plans are tried with other margins, three iterations each.
        for _ in range(18):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())

    run, verified = None, None
    if policy is None:
        iterate()
    else:
        with belady.virtualize(model, budget, policy=policy) as vm:
            iterate()
            run, verified = vm.run(), vm.verified
    return [*losses, *(p.detach().clone() for p in model.parameters())], run, verified


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_makes_values_leave(policy: str) -> None:
    plainly, _, _ = deep_run(None)
    torch.cuda.empty_cache()
    with pytest.raises(InfeasibleBudgetError) as refused:
        deep_run(policy, 64 * MIB)
    budget = refused.value.smallest_bytes + 384 * MIB
    assert budget < 1536 * MIB
    ours, run, verified = deep_run(policy, budget)
    assert all(torch.equal(a, b) for a, b in zip(plainly, ours, strict=True))
    assert run is not None
    assert run.measured is not None
    decided = [it for it in run.plan.decisions.values() if isinstance(it, Managed)]
    assert decided
    assert all(it.faults is (policy == "ocdnn_naive") for it in decided)
    assert moved(run, Lane.COPY_OUT) >= 64 * MIB
    assert run.measured.peak(Tier.DEVICE) <= budget
    assert verified
    # Whoever asks for more gets a plan that moves nothing.
    roomy = make_plan(policy, run.trace, run.hardware, Budget(64 << 30))
    assert not roomy.decisions


@pytest.mark.gpu
def test_all_fits_so_nothing_moves() -> None:
    training = Training(CNN, "cuda")
    with belady.virtualize(training.models, "8GiB", policy="ocdnn_opt") as vm:
        training.run(plain, range(6))
        run = vm.run()
    assert run is not None
    assert run.plan.moves_nothing
    assert run.hardware.managed is not None
    assert differences(expected(CNN, plain, "cuda", 6), training.outcome()) == []
