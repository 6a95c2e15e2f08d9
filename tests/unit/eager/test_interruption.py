"""A forward that ends without a word while it is observed: whoever runs next is not observed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.measure.recorder import Recorder
from tests.support.models import CNN
from tests.support.training import Training, footprint, plain, raising, repeatable

ROOM = "1GiB"


def interrupted(training: Training, error: type[BaseException] = KeyboardInterrupt) -> None:
    with raising(training.model, error, 3), pytest.raises(error):
        training.loss(0)


def evaluate(training: Training) -> None:
    with torch.no_grad():
        training.loss(1)


def call_another_module(_training: Training) -> None:
    nn.Tanh()(torch.ones(3))


def call_a_part(training: Training) -> None:
    part = next(m for m in training.model.modules() if isinstance(m, nn.Conv2d))
    part(torch.ones(1, part.in_channels, 8, 8))


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with repeatable():
        yield


NEXT = [evaluate, call_another_module, call_a_part]


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("goes_on", NEXT, ids=lambda it: it.__name__)
def test_whatever_the_program_does_next_finds_no_hook(
    goes_on: Callable[[Training], None], before: int
) -> None:
    training = Training(CNN)
    with belady.virtualize(training.model, ROOM, policy="floor"):
        found = footprint(training.model.modules())
        training.run(plain, range(before))
        opened = footprint(training.model.modules())["files"]
        interrupted(training)
        goes_on(training)
        assert footprint(training.model.modules()) == found | {
            "files": opened,
            "threads": footprint([])["threads"],
        }


@pytest.mark.parametrize("before", [1, 2])
def test_ops_are_neither_recorded_nor_timed(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    begin = Recorder._begin

    def counting(self: Recorder, func: object, *rest: object) -> object:
        seen.append(str(func))
        return begin(self, func, *rest)

    monkeypatch.setattr(Recorder, "_begin", counting)
    training = Training(CNN)
    with belady.virtualize(training.model, ROOM, policy="floor"):
        training.run(plain, range(before))
        interrupted(training)
        assert seen
        seen.clear()
        x = torch.ones(300, requires_grad=True)
        (slope,) = torch.autograd.grad(x.exp().sum(), x)
        assert torch.equal(slope, x.exp())
        assert seen == []
        # Nor is anything left of it after the next call.
        nn.Tanh()(x)
        assert footprint([])["dispatch modes"] == footprint([])["function modes"] == 0


def test_frames_of_the_interrupted_call_are_let_go() -> None:
    class Held:
        """Something of the user's."""

    alive: list[Callable[[], object]] = []

    def one_try(training: Training) -> None:
        held = Held()
        alive.append(weakref.ref(held))
        interrupted(training)

    training = Training(CNN)
    with belady.virtualize(training.model, ROOM, policy="floor"):
        one_try(training)
        torch.ones(3)
        assert alive[0]() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("at", [1, 2])
def test_the_iteration_is_as_if_it_had_never_been(error: type[BaseException], at: int) -> None:
    known = []
    for goes_wrong in (False, True):
        training, phases = Training(CNN), []
        with belady.virtualize(training.model, ROOM, policy="floor") as vm:
            vm.listeners.append(lambda stats, into=phases: into.append(stats.phase))
            training.run(plain, range(at))
            if goes_wrong:
                interrupted(training, error)
                evaluate(training)
            training.run(plain, range(at, 4))
            run = vm.run()
        assert run is not None
        ops = [(op.name, op.module, op.phase, op.reads, op.writes) for op in run.trace.ops]
        known.append((phases, ops, run.plan.decisions))
    assert known[0] == known[1]


def test_a_backward_inside_a_forward_is_still_observed() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(x).exp().sum(), x, create_graph=True)
            return slope.square().mean()

    torch.manual_seed(0)
    model = Penalised()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with belady.virtualize(model, ROOM, policy="floor") as vm:
        for _ in range(4):
            model(torch.randn(64, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        run = vm.run()
    assert run is not None
    assert len(run.trace.ops) > 10
