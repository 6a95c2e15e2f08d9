"""Convolutions with less workspace: asked for where that helps, and undone whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import belady
from belady.eager import conductor
from belady.errors import InfeasibleBudgetError
from belady.ir.plan import Budget, Workspace
from belady.ir.run import Run
from belady.ir.trace import Tier
from belady.measure.algorithms import Algorithms
from belady.measure.clock import CpuClock, clock_for
from belady.measure.recorder import Recorder
from belady.memory.algorithms import available
from belady.planners import plan as make_plan
from belady.planners import smallest_budget
from tests.support.training import raising

MIB = 1 << 20
GIB = 1 << 30
# Two are observed. Of each plan one settles, one shows what convolutions take beside, and two are
# verified: time for two plans.
ITERATIONS = 10


class Stack(nn.Module):
    """Much is saved before a convolution whose backward takes much workspace."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            *(nn.Tanh() for _ in range(4)),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Training:
    """The flag of cuDNN is noted in every forward and backward."""

    def __init__(self, device: str, width: int, images: int, edge: int) -> None:
        torch.manual_seed(0)
        self.model = Stack(width).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.x = torch.rand(images, 3, edge, edge, device=device)
        self.y = torch.arange(images, device=device) % 10
        self.losses: list[float] = []
        self.flags: list[bool] = []
        self.model.features[-1].register_forward_hook(self._note)
        self.model.features[-1].register_full_backward_hook(self._note)

    def step(self) -> None:
        loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def _note(self, *_: object) -> None:
        self.flags.append(torch.backends.cudnn.deterministic)


@pytest.fixture(autouse=True)
def flag() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    assert not cudnn.deterministic
    yield
    left, cudnn.deterministic = cudnn.deterministic, False
    assert not left


def run_of(vm: belady.VirtualMemory) -> Run:
    run = vm.run()
    assert run is not None
    return run


# -- on a CPU, where workspace is said to be taken -------------------------------------------------


class Clock(CpuClock):
    """Says what convolutions take: 256 MiB in backward alone, or 1 MiB by the choices beside."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[str] = []
        self.workspaces: list[int] = []

    def stop(self) -> None:
        super().stop()
        beside, backward = torch.backends.cudnn.deterministic, "_backward" in self.named[-1]
        taken = MIB if beside else 256 * MIB * backward
        self.workspace = taken if "convolution" in self.named[-1] else 0
        self.workspaces.append(self.workspace)

    def results(self) -> list[tuple[float, int]]:
        return list(zip(self.seconds, self.workspaces, strict=True))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Recorder._begin

    def begun(recorder: Recorder, func: Any, *rest: Any) -> Any:
        if isinstance(recorder.clock, Clock):
            recorder.clock.named.append(str(func))
        return begin(recorder, func, *rest)

    def algorithms(device: torch.device, _: object, least_bytes: int) -> Algorithms:
        return Algorithms(device, CpuClock(), least_bytes, lambda _device, _nbytes: nullcontext())

    monkeypatch.setattr(Recorder, "_begin", begun)
    monkeypatch.setattr(conductor, "available", lambda _: True)
    monkeypatch.setattr(conductor, "Algorithms", algorithms)
    monkeypatch.setattr(conductor, "clock_for", lambda _: Clock())


def small() -> Training:
    return Training("cpu", width=4, images=2, edge=16)


@pytest.mark.usefixtures("said")
def test_a_plan_with_least_workspace_turns_to_it_while_its_iterations_run() -> None:
    plain, training = small(), small()
    with belady.virtualize(training.model, 100 * MIB) as vm:
        for _ in range(ITERATIONS):
            plain.step()
            training.step()
            assert not torch.backends.cudnn.deterministic
        run = run_of(vm)
        assert "one algorithm for all calls of the same shapes" in vm.report()
    assert run.plan.workspace is Workspace.MEMORY
    assert run.plan.numerics == ("workspace=memory",)
    planned = 2 * (ITERATIONS - 2)
    assert all(training.flags[-planned:])
    assert not any(training.flags[:-planned])
    assert training.losses == plain.losses


@pytest.mark.usefixtures("said")
def test_what_convolutions_take_beside_is_seen_once_they_run_so() -> None:
    training = small()
    with belady.virtualize(training.model, 100 * MIB) as vm:
        phases: list[str] = []
        vm.listeners.append(lambda stats: phases.append(stats.phase))
        for _ in range(ITERATIONS):
            training.step()
        run = run_of(vm)
    assert phases[2:6] == ["first planned", "first planned", "verified", "verified"]
    # Those of forward were not tried, as they take nothing usually.
    backward = {"lean": MIB, "usual": 256 * MIB}
    forward = {"lean": MIB, "usual": 0}
    assert list(choices(run).values()) == [forward, forward, backward, backward]
    assert run.plan.layer_algorithms == tuple((index, "lean") for index in convolutions(run))
    assert MIB < run.predicted.peak(Tier.DEVICE) < 100 * MIB


@pytest.mark.usefixtures("said")
def test_what_fits_or_must_be_exact_is_left_alone() -> None:
    training = small()
    with belady.virtualize(training.model, GIB) as vm:
        for _ in range(ITERATIONS):
            training.step()
        assert run_of(vm).plan.workspace is Workspace.UNCHANGED
    assert not any(training.flags)
    training = small()
    with belady.virtualize(training.model, 100 * MIB, exact=True, policy="vdnn_all"):
        training.step()
        with pytest.raises(InfeasibleBudgetError):
            training.step()
    assert not any(training.flags)


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_inside_an_iteration_turns_back(error: type[BaseException]) -> None:
    training = small()
    with belady.virtualize(training.model, 100 * MIB) as vm:
        for _ in range(ITERATIONS):
            training.step()
        with pytest.raises(error), raising(training.model, error, layer=-1):
            training.step()
        training.step()
        assert not torch.backends.cudnn.deterministic
        assert run_of(vm).plan.workspace is Workspace.MEMORY
        training.model(training.x)
        assert torch.backends.cudnn.deterministic
    # An iteration that never came to its step ends with the block.
    assert not torch.backends.cudnn.deterministic


# -- on a GPU --------------------------------------------------------------------------------------


def large() -> Training:
    """Its second convolution takes gigabytes of workspace for its weights, in fp32."""
    return Training("cuda", width=64, images=64, edge=224)


@pytest.fixture
def any_algorithm() -> Iterator[None]:
    """Parity asks for deterministic algorithms, which leaves no choice of belady's own."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def full_precision(any_algorithm: None) -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before, cudnn.allow_tf32 = cudnn.allow_tf32, False
    yield
    cudnn.allow_tf32 = before
    torch.cuda.empty_cache()


class Greedy:
    """Stands for a convolution that takes a GiB, come what may."""

    def __str__(self) -> str:
        return "aten.convolution.default"

    def __call__(self, *_: object) -> Tensor:
        return torch.empty(GIB, dtype=torch.uint8, device="cuda")


def allocated_by_a_step(training: Training) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    return torch.cuda.max_memory_allocated()


def convolutions(run: Run) -> list[int]:
    return [index for index, op in enumerate(run.trace.ops) if "convolution" in op.name]


def choices(run: Run) -> dict[str, dict[str, int]]:
    """Workspace of each algorithm, by op."""
    return {
        f"{index} {op.name}": {it.name: it.workspace_bytes for it in op.algorithms}
        for index, op in enumerate(run.trace.ops)
        if op.algorithms
    }


@pytest.mark.gpu
@pytest.mark.usefixtures("full_precision")
def test_a_large_convolution_does_with_less_and_plain_pytorch_has_its_own_back() -> None:
    plain, training = large(), large()
    usual = [allocated_by_a_step(plain) for _ in range(ITERATIONS)][-1]
    fraction = torch.cuda.get_per_process_memory_fraction()
    rich = run_at(training, 2 * usual)
    found = choices(rich)
    assert found, "cuDNN took little workspace from the start: choose a larger convolution"
    assert all(way["lean"] < way["usual"] for way in found.values())
    budget = scarce(rich)
    training = large()
    run = run_at(training, budget)
    assert run.plan.workspace is Workspace.MEMORY
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) <= budget
    saved = max(way["usual"] - way["lean"] for way in found.values())
    assert run.measured.peak(Tier.DEVICE) < usual - saved // 2
    assert training.losses == pytest.approx(plain.losses, rel=1e-3)
    assert torch.cuda.get_per_process_memory_fraction() == fraction
    assert not torch.backends.cudnn.deterministic
    torch.cuda.empty_cache()
    assert allocated_by_a_step(plain) == pytest.approx(usual, abs=64 * MIB)


@pytest.mark.gpu
@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("policy", ["vdnn_conv", "vdnn_dyn"])
def test_what_a_lean_plan_takes_is_known_of_every_convolution(policy: str) -> None:
    plain = large()
    usual = [allocated_by_a_step(plain) for _ in range(ITERATIONS)][-1]
    rich = run_at(plain, 2 * usual)
    run = run_at(large(), scarce(rich), policy)
    assert run.plan.workspace is Workspace.MEMORY
    found = choices(run)
    assert len(found) == len(convolutions(run)) == 4
    assert all("lean" in ways for ways in found.values())
    assert run.plan.layer_algorithms == tuple((index, "lean") for index in convolutions(run))
    assert run.measured is not None
    measured = run.measured.peak(Tier.DEVICE)
    assert run.predicted.peak(Tier.DEVICE) == pytest.approx(measured, rel=0.03)


def run_at(training: Training, budget: int, policy: str = "vdnn_conv") -> Run:
    torch.cuda.empty_cache()
    with belady.virtualize(training.model, budget, policy=policy) as vm:
        for _ in range(ITERATIONS):
            training.step()
        return run_of(vm)


def scarce(run: Run) -> int:
    """A budget that has room for the usual workspace at the floor, but not beside what is kept.

    So cuDNN takes its usual algorithms while they are observed.
    """
    known = run.trace, run.hardware
    least = max(smallest_budget(it, *known, run.plan.budget) for it in ("floor", "vdnn_conv"))
    budget = least + 256 * MIB
    assert make_plan("vdnn_conv", *known, Budget(budget)).workspace is Workspace.MEMORY
    return budget


@pytest.mark.gpu
@pytest.mark.usefixtures("full_precision")
def test_a_trial_that_ends_in_an_error_leaves_the_limit_as_it_was() -> None:
    device = torch.device("cuda", 0)
    before = torch.cuda.get_per_process_memory_fraction(device)
    x = torch.zeros(8 * MIB, device=device)
    trials = Algorithms(device, clock_for(device))
    trials.learn(0, (Greedy(), (x, x, None, [1], [1], [1]), {}), x, GIB)
    assert trials.found() == {}
    assert torch.cuda.get_per_process_memory_fraction(device) == before
    assert not torch.backends.cudnn.deterministic
    assert Greedy()().numel() == GIB


@pytest.mark.gpu
@pytest.mark.usefixtures("any_algorithm")
def test_who_is_deterministic_already_is_asked_nothing() -> None:
    assert available(torch.device("cuda", 0))
    torch.backends.cudnn.deterministic = True
    assert not available(torch.device("cuda", 0))
    torch.backends.cudnn.deterministic = False
