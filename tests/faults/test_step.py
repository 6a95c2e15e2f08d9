"""An iteration that runs out of memory is put back and run again, in less memory: bit for bit."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import belady
from belady.eager.attempts import RETRIES
from belady.graph.captured import Captured
from belady.graph.session import Session
from belady.graph.state import Turn
from belady.ir.plan import Plan
from tests.support.training import differences, repeatable

FULL = "no room for 98 MiB"
ITERATIONS = 7
# Of iterations: warm-up, one that verifies a plan, and a steady one.
FAULTY = (0, 3, 6)
BUDGET = "1GiB"


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    torch._dynamo.reset()
    with repeatable():
        yield
    torch._dynamo.reset()


class Fault:
    """Raises as torch's allocator does, as often as it is told to, from the next time on."""

    def __init__(self) -> None:
        self.left = 0
        self.raised = 0

    def __call__(self, *_: object) -> None:
        if self.left > 0:
            self.left -= 1
            self.raised += 1
            raise torch.OutOfMemoryError(FULL)


class Failing(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        self.fault()
        return x


class Net(nn.Module):
    """Batch norms, dropouts, and a place in the middle where memory may run out."""

    def __init__(self, fault: Fault, *, inside: bool) -> None:
        super().__init__()
        middle: list[nn.Module] = [Failing(fault)] if inside else []
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3)),
            *middle,
            *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3)),
            *(nn.Flatten(), nn.Linear(8 * 64, 10)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.layers(x))


class Work:
    """A training whose iterations are done by ``do``, which is given a closure."""

    def __init__(self, where: str = "forward") -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        self.fault = Fault()
        self.where = where
        self.model = Net(self.fault, inside=where == "forward")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        if where == "backward":
            self.model.layers[5].weight.register_hook(self.fault)
        self.losses: list[Tensor] = []
        self.parts = 1
        self.zeroed = True

    def closure(self) -> Tensor:
        total = torch.zeros(())
        for _ in range(self.parts):
            x = torch.randn(4, 3, 8, 8) * (1 + random.random() + np.random.rand())  # noqa: NPY002
            loss = self.model(x).square().mean()
            if self.where == "loss":
                self.fault()
            loss.backward()
            total = total + loss.detach()
        return total

    def run(self, do: Callable[[Callable[[], Tensor]], Tensor], times: dict[int, int]) -> Work:
        for index in range(ITERATIONS):
            self.fault.left = times.get(index, 0)
            if self.zeroed or index % 2 == 0:
                self.optimizer.zero_grad()
            self.losses.append(do(self.closure))
            self.optimizer.step()
        # Now: another training of the same process draws on the same generators.
        self.drawn = torch.get_rng_state()
        self.others = torch.tensor([random.random(), np.random.rand()])  # noqa: NPY002
        return self

    def outcome(self) -> dict[str, Tensor]:
        found = {f"loss {i}": loss for i, loss in enumerate(self.losses)}
        found |= {f"state {n}": t for n, t in self.model.state_dict().items()}
        found |= {
            f"grad {n}": p.grad for n, p in self.model.named_parameters() if p.grad is not None
        }
        found |= {"random": self.drawn, "python, numpy": self.others}
        return {name: it.detach().clone() for name, it in found.items()}


def expected(where: str, **changes: object) -> dict[str, Tensor]:
    work = Work(where)
    vars(work).update(changes)
    return work.run(lambda closure: closure(), {}).outcome()


def budget_of_floor(work: Work, times: float) -> int:
    """So many times what the floor needs."""
    try:
        with belady.virtualize(work.model, 1) as vm:
            vm.step(work.closure)
    except belady.InfeasibleBudgetError as error:
        return int(times * error.smallest_bytes)
    raise AssertionError("a byte was enough")


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
@pytest.mark.parametrize("times", [1, 2, RETRIES])
def test_a_retry_changes_no_bit(where: str, times: int) -> None:
    work = Work(where)
    with belady.virtualize(work.model, BUDGET) as vm:
        work.run(vm.step, dict.fromkeys(FAULTY, times))
    assert work.fault.raised == times * len(FAULTY)
    assert not differences(expected(where), work.outcome())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nor_does_one_under_a_tight_budget(where: str) -> None:
    budget = budget_of_floor(Work(), 1.3)
    work = Work(where)
    with belady.virtualize(work.model, budget, policy="hybrid") as vm:
        work.run(vm.step, {4: 1, 6: 2})
        assert vm.verified is not False
    assert not differences(expected(where), work.outcome())


@pytest.mark.parametrize("where", ["loss", "backward"])
def test_nor_with_captured_graphs(where: str) -> None:
    work = Work(where)
    with belady.virtualize(work.model, BUDGET, engine="graph") as vm:
        work.run(vm.step, dict.fromkeys(FAULTY, 1))
    assert work.fault.raised == len(FAULTY)
    assert not differences(expected(where), work.outcome())


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("zeroed", [True, False])
def test_gradients_that_were_there_come_back(where: str, zeroed: bool) -> None:
    work = Work(where)
    work.zeroed, work.parts = zeroed, 2
    with belady.virtualize(work.model, BUDGET) as vm:
        work.run(vm.step, {1: 1, 3: 2, 5: 1})
    assert not differences(expected(where, zeroed=zeroed, parts=2), work.outcome())


def test_inside_of_a_block_that_is_one_iteration() -> None:
    work = Work("backward")
    with belady.virtualize(work.model, BUDGET) as vm:

        def do(closure: Callable[[], Tensor]) -> Tensor:
            with vm.iteration():
                return vm.step(closure)

        work.run(do, dict.fromkeys(FAULTY, 1))
    assert not differences(expected("backward"), work.outcome())


def plans(vm: belady.VirtualMemory) -> Plan:
    run = vm.run()
    assert run is not None
    return run.plan


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_what_runs_again_runs_in_less_memory(engine: str) -> None:
    work = Work("loss")
    with belady.virtualize(work.model, BUDGET, engine=engine) as vm:
        work.run(vm.step, {5: 1})
        assert plans(vm).planner.startswith("floor")
        assert "the device ran out of memory: all that may move does" in vm.report()
    assert not differences(expected("loss"), work.outcome())


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_what_ran_out_before_there_was_a_plan_is_not_held_against_it(engine: str) -> None:
    work = Work("loss")
    with belady.virtualize(work.model, BUDGET, engine=engine) as vm:
        work.run(vm.step, {0: 1, 1: 1})
        assert plans(vm).moves_nothing


def test_a_plan_that_moves_gets_a_wider_margin_first() -> None:
    budget = budget_of_floor(Work(), 1.3)
    work = Work("loss")
    with belady.virtualize(work.model, budget, policy="lifetime") as vm:
        work.run(vm.step, {5: 1})
        run = vm.run()
        assert run is not None
        assert "lifetime" in run.plan.planner
        assert run.hardware.allocator.margin_fraction > 0
        assert any("ran out of memory: tried" in note for note in run.notes)


def test_after_three_retries_the_error_says_what_to_do() -> None:
    work = Work("backward")
    with belady.virtualize(work.model, BUDGET) as vm:
        work.run(vm.step, {})
        before = {n: t.clone() for n, t in work.model.state_dict().items()}
        drawn = torch.get_rng_state()
        work.optimizer.zero_grad()
        work.fault.left = 100
        with pytest.raises(belady.OutOfMemoryError) as raised:
            vm.step(work.closure)
        assert work.fault.raised == RETRIES + 1
        said = str(raised.value)
        assert FULL in said
        assert "run 4 times" in said
        assert "larger budget" in said
        assert "all in one closure" in said
        assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
        # As before the step, and training goes on.
        assert not differences(before, dict(work.model.state_dict()))
        assert torch.equal(drawn, torch.get_rng_state())
        assert all(p.grad is None for p in work.model.parameters())
        work.fault.left = 0
        work.run(vm.step, {})


def test_a_closure_that_steps_is_not_run_twice() -> None:
    work = Work("loss")

    def stepping() -> Tensor:
        loss = work.closure()
        work.optimizer.step()
        work.fault()
        return loss

    with belady.virtualize(work.model, BUDGET) as vm:
        work.where, work.fault.left = "", 1
        with pytest.raises(belady.OutOfMemoryError, match="it had changed a parameter"):
            vm.step(stepping)
    assert work.fault.raised == 1


def test_errors_of_the_users_own_pass_unchanged() -> None:
    work = Work()
    calls = []

    def wrong() -> Tensor:
        calls.append(0)
        raise ValueError("mine")

    with belady.virtualize(work.model, BUDGET) as vm, pytest.raises(ValueError, match="mine"):
        vm.step(wrong)
    assert len(calls) == 1


def test_what_an_attempt_held_is_free_before_the_next() -> None:
    model = nn.Linear(8, 8)
    alive: list[weakref.ref[Tensor]] = []
    found: list[bool] = []
    errors: list[BaseException] = []

    def closure() -> Tensor:
        found.append(any(ref() is not None for ref in alive))
        large = model(torch.randn(4, 8))
        alive.append(weakref.ref(large))
        if len(alive) <= RETRIES:
            # Somebody may hold the error, and so its traceback and frames.
            errors.append(torch.OutOfMemoryError(FULL))
            raise errors[-1]
        return large.sum()

    gc.disable()
    try:
        with belady.virtualize(model, BUDGET) as vm:
            vm.step(closure).backward()
    finally:
        gc.enable()
    assert found == [False] * (RETRIES + 1)


def test_buffers_that_were_replaced_or_added_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    mean = model[1].running_mean
    fault = Fault()

    def closure() -> Tensor:
        loss = model(torch.randn(4, 4)).square().sum()
        if fault.left:
            model[1].running_mean = torch.ones(4)
            model[0].register_buffer("late", torch.ones(1))
        fault()
        loss.backward()
        return loss

    with belady.virtualize(model, BUDGET) as vm:
        fault.left = 1
        vm.step(closure)
    assert model[1].running_mean is mean
    assert not hasattr(model[0], "late")
    assert int(model[1].num_batches_tracked) == 1


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_without_step_the_error_says_so_where_it_happens(engine: str) -> None:
    work = Work()
    with belady.virtualize(work.model, BUDGET, engine=engine) as vm:
        work.run(lambda closure: closure(), {})
        # Of the kind that was planned, which has no gradients yet.
        work.optimizer.zero_grad()
        work.fault.left = 1
        with pytest.raises(torch.OutOfMemoryError) as raised:
            work.closure()
        (note,) = raised.value.__notes__
        assert "vm.step(closure)" in note
        assert "larger budget" in note
        del raised
        work.run(lambda closure: closure(), {})
        if engine == "eager":
            # What Dynamo does not capture for the fault in it is no floor's.
            assert plans(vm).planner.startswith("floor")


def test_a_smaller_batch_in_the_users_own_handler_is_no_fault_of_the_plan() -> None:
    work = Work("nowhere")
    with belady.virtualize(work.model, BUDGET) as vm:
        work.run(lambda closure: closure(), {})
        try:
            raise torch.OutOfMemoryError(FULL)
        except torch.OutOfMemoryError:
            work.run(lambda closure: closure(), {})
        assert not plans(vm).planner.startswith("floor")


def test_out_of_memory_in_a_captured_backward_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("nowhere")
    fault, plainly = Fault(), Session.enter

    def enter(session: Session, graph: Captured, args: Sequence[object]) -> Turn:
        turn = plainly(session, graph, args)

        def backward(*given: object) -> object:
            fault()
            return turn.program.backward(*given)

        return replace(turn, program=replace(turn.program, backward=backward))

    with belady.virtualize(work.model, BUDGET, engine="graph") as vm:
        work.run(lambda closure: closure(), {})
        monkeypatch.setattr(Session, "enter", enter)
        work.optimizer.zero_grad()
        fault.left = 1
        with pytest.raises(torch.OutOfMemoryError) as raised:
            work.closure()
        assert "vm.step(closure)" in raised.value.__notes__[0]
        work.run(lambda closure: closure(), {})
        assert plans(vm).planner.startswith("floor")
