"""What a sample knows of phases: marks where one begins, while a plan is verified."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.ir.timeline import Measured
from belady.ir.trace import Phase
from belady.measure.monitor import Monitor, Sample, summarize
from belady.memory.carrier import Carrier

# Longer than anything else in an iteration of these tests, so that it shows in one phase.
NAP_S = 0.05


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        self.at += 1.0
        return self.at


def sample_of(*phases: Phase) -> Sample:
    clock = Clock()
    sample = Sample(0.0, now=clock)
    for phase in phases:
        sample.mark(phase)
    sample.ended = clock()
    return sample


def test_phases_last_until_the_next_begins() -> None:
    sample = sample_of(Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    # FORWARD was under way already.
    assert len(sample.marks) == 2
    assert sample.phases == {Phase.FORWARD: 1.0, Phase.BACKWARD: 1.0, Phase.OPTIMIZER: 1.0}


def test_several_passes_are_added_up() -> None:
    twice = (Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    took = sample_of(*twice).phases
    assert took == {Phase.FORWARD: 2.0, Phase.BACKWARD: 2.0, Phase.OPTIMIZER: 1.0}


def test_where_backward_does_not_show_nothing_is_said() -> None:
    assert sample_of(Phase.OPTIMIZER).phases == {}


def test_a_root_called_without_end_is_not_timed() -> None:
    sample = sample_of(*[Phase.BACKWARD, Phase.FORWARD] * 100)
    assert len(sample.marks) <= 64
    assert sample.phases == {}


def test_only_what_all_samples_have_is_told() -> None:
    whole = sample_of(Phase.BACKWARD, Phase.OPTIMIZER)
    assert [it.phase for it in summarize([whole, whole], 0, ()).phases] == list(whole.phases)
    assert summarize([whole, sample_of()], 0, ()).phases == ()


def test_level_0_takes_no_event_more() -> None:
    monitor = Monitor(torch.device("cpu"), Carrier(torch.device("cpu")))
    for level, marks in ((0, 0), (1, 1)):
        sample = monitor.begin(level)
        sample.mark(Phase.BACKWARD)
        assert len(monitor.end(sample).marks) == marks
        sample.mark(Phase.OPTIMIZER)
        assert len(sample.marks) == marks


class Napping(nn.Module):
    """Sleeps where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
        self.where = Phase.OPTIMIZER

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(x)
        if self.where is Phase.FORWARD:
            time.sleep(NAP_S)
        return torch.as_tensor(out)


def nap(*_: object) -> None:
    time.sleep(NAP_S)


def train(where: Phase, *, engine: str = "eager", passes: int = 1) -> Measured:
    model = Napping()
    model.where = where
    if where is Phase.BACKWARD:
        model.layers[1].weight.register_hook(nap)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if where is Phase.OPTIMIZER:
        step: Callable[..., None] = nap
        optimizer.register_step_pre_hook(step)
    with belady.virtualize(model, "64MiB", engine=engine) as vm:
        for _ in range(6):
            for _ in range(passes):
                model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        run = vm.run()
    assert run is not None
    assert run.measured is not None
    return run.measured


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("where", [Phase.FORWARD, Phase.BACKWARD])
def test_time_is_counted_where_it_is_spent(where: Phase, passes: int) -> None:
    measured = train(where, passes=passes)
    took = {it.phase: it.seconds for it in measured.phases}
    assert set(took) == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert took[where] > passes * NAP_S
    assert sum(s for phase, s in took.items() if phase is not where) < NAP_S
    assert sum(took.values()) == pytest.approx(measured.seconds, rel=1e-6)


def test_a_step_is_a_phase_of_its_own() -> None:
    took = {it.phase: it.seconds for it in train(Phase.OPTIMIZER).phases}
    assert took[Phase.FORWARD] + took[Phase.BACKWARD] < NAP_S


@pytest.fixture
def graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("graphs")
def test_graphs_have_two_phases() -> None:
    took = {it.phase: it.seconds for it in train(Phase.BACKWARD, engine="graph").phases}
    assert set(took) == {Phase.FORWARD, Phase.BACKWARD}
    assert took[Phase.FORWARD] < NAP_S


def test_a_block_that_is_one_iteration_is_not_told_apart() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with belady.virtualize(model, "64MiB") as vm:
        for _ in range(6):
            with vm.iteration():
                model(torch.randn(4, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        run = vm.run()
    assert run is not None
    assert run.measured is not None
    assert run.measured.phases == ()
