"""Backward graphs in the coordinated order: plain PyTorch's bits, in less memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import belady
from belady.errors import InfeasibleBudgetError
from belady.graph import coordinated as rewriting
from belady.graph.captured import Captured
from belady.graph.coordinated import coordinated
from belady.ir.encoding import encoding_of
from belady.ir.trace import Tier, Trace
from belady.measure.probe import probe
from belady.planners import smallest_budget
from tests.parity.graphs import PlannedHost, compiled
from tests.parity.racing import ROOM, Budget, hostile_carrier, random_plan
from tests.support.models import CNN, GAN, GPT, INCEPTION, TIED, Task
from tests.support.training import (
    Step,
    Training,
    accumulating,
    adversarial,
    autocast,
    differences,
    plain,
    twice_backward,
)

MIB = 2**20
WIDE = 16


class Wide(nn.Module):
    """Convolutions and ReLUs of one width, and linear layers: it peaks where it goes backward."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(WIDE if i else 3, WIDE, 3, padding=1) for i in range(4)
        )
        self.line = nn.Conv1d(WIDE, WIDE, 3, padding=1)
        self.linear, self.last = nn.Linear(WIDE, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = F.relu(convolution(x))
        x = self.line(F.avg_pool2d(x, 4).flatten(2)).mean(2)
        return self.last(F.gelu(self.linear(x)))


def images(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 3, 32, 32, generator=generator)
    return x, torch.randint(10, (size,), generator=generator)


BROAD = Task("broad", lambda: [Wide()], images)


class Ordering(PlannedHost):
    """Has every graph rewritten as soon as it is captured."""

    def captured(self, graph: Captured) -> None:
        assert graph.joint is not None
        graph.put(coordinated(graph.joint, graph.layout))


def damage(task: Task, step: Step, kinds: Sequence[str]) -> tuple[list[str], PlannedHost]:
    """What differs from plain PyTorch under random plans of rewritten graphs."""
    device = "cuda" if kinds[0] == "cuda" else "cpu"
    training, seeds = Training(task, device), itertools.count()
    carriers = [hostile_carrier(kind) for kind in kinds]

    def choose(trace: Trace) -> Any:
        return random_plan(trace, kinds[0], next(seeds))

    host = Ordering(training.models, carriers[0], choose)
    try:
        with compiled(training, host):
            for index, carrier in enumerate(carriers):
                host.replan(carrier, choose)
                training.run(step, [index])
    finally:
        for carrier in carriers:
            carrier.close()
    expected = Training(task, device).run(step, range(len(kinds))).outcome()
    assert host.reasons == []
    return differences(expected, training.outcome()), host


KINDS = [["direct"] * 3, pytest.param(["cuda"] * 3, marks=pytest.mark.gpu)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kinds", KINDS, ids=["cpu", "cuda"])
@pytest.mark.parametrize("task", [BROAD, CNN, GPT, INCEPTION, TIED, GAN], ids=str)
def test_random_plans_of_ordered_graphs_change_no_bit(task: Task, kinds: list[str]) -> None:
    wrong, _ = damage(task, adversarial if task is GAN else plain, kinds)
    assert wrong == []


@pytest.mark.parametrize(
    "step", [autocast, accumulating, twice_backward], ids=lambda step: step.__name__
)
@pytest.mark.parametrize("task", [BROAD, CNN], ids=str)
def test_however_people_train(task: Task, step: Step) -> None:
    wrong, _ = damage(task, step, ["direct"] * 2)
    assert wrong == []


class Thresholds(nn.Module):
    """The backward of a threshold at 0 is a ReLU's, of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.one, self.other = nn.Threshold(0, 0.5), nn.Threshold(0, -1.0)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.last(self.one(self.first(x)))).mean((2, 3)))


def test_a_threshold_is_no_relu() -> None:
    task = Task("thresholds", lambda: [Thresholds()], images)
    wrong, _ = damage(task, plain, ["direct"] * 2)
    assert wrong == []


def test_a_mistake_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of something else are another gradient."""
    real = rewriting._passed

    def spoilt(step: Any, signs: Any) -> Any:
        signs.target = torch.ops.aten.lt.Scalar
        return real(step, signs)

    monkeypatch.setattr(rewriting, "_passed", spoilt)
    assert damage(BROAD, plain, ["direct"])[0] != []


def steps_of(task: Task) -> tuple[Captured, list[str]]:
    """The graph of a model, and what its backward calls once it is rewritten."""
    graphs: list[Captured] = []

    class Kept(Ordering):
        def captured(self, graph: Captured) -> None:
            graphs.append(graph)

    training = Training(task)
    carrier = hostile_carrier("direct")
    try:
        host = Kept(training.models, carrier, lambda it: random_plan(it, "direct", 0))
        with compiled(training, host):
            training.run(plain, [0])
    finally:
        carrier.close()
    (graph,) = graphs
    assert graph.joint is not None
    joint = coordinated(graph.joint, graph.layout)
    return graph, [step.node.target.__name__ for step in joint.backward]


def test_what_is_rewritten() -> None:
    graph, after = steps_of(BROAD)
    assert graph.joint is not None
    before = [step.node.target.__name__ for step in graph.joint.backward]
    # The first convolution has no gradient of its input; one in one dimension stays whole.
    assert before.count("convolution_backward.default") == 5
    assert after.count("convolution_backward.default") == 5 + 3
    assert after.count("stand_in.default") == 3
    assert after.count("ne.Scalar") == after.count("passed_by_sign.default") == 4
    assert "threshold_backward.default" not in after
    # Gradients of the input come last of a layer's: the last layer's first three ops are its own.
    works = [name for name in after if name.startswith(("mm", "sum"))]
    assert works[:3] == ["mm.default", "sum.dim_IntList", "mm.default"]


def traces_of(task: Task) -> list[Trace]:
    """Of a graph as it was traced and in the order."""
    found = []
    for host in (PlannedHost, Ordering):
        training = Training(task)
        carrier = hostile_carrier("direct")
        traces: list[Trace] = []

        def choose(trace: Trace, seen: list[Trace] = traces) -> Any:
            seen.append(trace)
            return random_plan(trace, "direct", 0)

        try:
            with compiled(training, host(training.models, carrier, choose)):
                training.run(plain, [0])
        finally:
            carrier.close()
        found.append(traces[0])
    return found


def floors(task: Task) -> list[int]:
    """Smallest budgets of both."""
    machine = probe("cpu")
    return [smallest_budget("floor", it, machine, Budget(ROOM)) for it in traces_of(task)]


def test_of_a_relu_that_a_pooling_reads_signs_are_still_enough() -> None:
    for trace in traces_of(BROAD):
        found = [encoding_of(trace, value) for value in trace.saved]
        assert [it.codec for it in found if it is not None] == ["sign"]


def test_a_gradient_takes_the_place_of_what_was_saved() -> None:
    before, after = floors(BROAD)
    largest = 8 * WIDE * 32 * 32 * 4
    # Signs take a byte where there were four.
    assert before - after >= largest - largest // 4 - 4096


def trained(
    budget: int, count: int, policy: str = "auto", *, exact: bool = True
) -> tuple[Training, Any, str]:
    training = Training(BROAD)
    vm = belady.virtualize(training.models, budget, policy=policy, engine="graph", exact=exact)
    with vm:
        training.run(plain, range(count))
        run, text = vm.run(), vm.report()
    assert run is not None
    return training, run, text


def test_auto_puts_it_in_force_where_a_graph_does_not_fit() -> None:
    with pytest.raises(InfeasibleBudgetError) as refused:
        trained(MIB, 1)
    budget = refused.value.smallest_bytes
    _, after = floors(BROAD)
    assert budget == pytest.approx(after, rel=0.05)
    training, run, text = trained(budget, 6)
    assert differences(Training(BROAD).run(plain, range(6)).outcome(), training.outcome()) == []
    assert run.measured.peak(Tier.DEVICE) <= budget
    assert "the gradient of the input takes the input's place (the budget is too small" in text
    # With room for more it is left alone.
    _, _, text = trained(2 * budget, 6)
    assert "takes the input's place" not in text


@pytest.mark.parametrize("policy", ["layrub_intra", "layrub_hybrid", "layrub_inter"])
def test_layrubs_policies_run_on_graphs(policy: str) -> None:
    training, run, text = trained(ROOM, 6, policy)
    assert differences(Training(BROAD).run(plain, range(6)).outcome(), training.outcome()) == []
    assert ("takes the input's place (as the policy has it)" in text) is (policy != "layrub_inter")
    assert bool(run.plan.decisions) is (policy != "layrub_intra")
