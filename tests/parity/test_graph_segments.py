"""Runs of ops between movements as one call each: which ops, how often compiled, and how timed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import belady
import tests.parity.graphs as graphs
from belady.graph import inductor, orders, program
from belady.graph.ops import is_fused
from belady.graph.orders import Act, orders_of
from belady.ir.curves import curve
from belady.ir.hardware import Allocator
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Phase, Trace
from belady.measure.monitor import Sample
from belady.measure.verification import Verification
from tests.parity.graphs import PlannedHost, compiled
from tests.parity.racing import hostile_carrier, random_plan
from tests.support.models import CNN, Task
from tests.support.training import Training, at_tight_budget, plain

WIDTH, DEPTH, BATCH = 16, 4, 24
Choose = Callable[[Trace], Plan]


def blocks() -> nn.Module:
    """The same block four times."""
    torch.manual_seed(0)
    block = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.GELU()]
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(DEPTH) for layer in block))


def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, WIDTH, generator=generator)
    return x, torch.randint(WIDTH, (size,), generator=generator)


BLOCKS = Task("blocks", lambda: [blocks()], batch)


def roomy(trace: Trace) -> Plan:
    return replace(random_plan(trace, "threads", 3), predicted_peak_bytes=1 << 40)


def tight(trace: Trace) -> Plan:
    """The same plan where all of it is near its peak."""
    return replace(roomy(trace), predicted_peak_bytes=0, budget=Budget(1))


def interpreted(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """What a compiler would make of a segment, with the kernels and bits of plain PyTorch."""
    return lambda given: fx.Interpreter(module).boxed_run(given)


class Segments:
    """Stands for Inductor's compiler: keeps what it was asked to compile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.compiled = 0, list[fx.GraphModule]()
        self._inductor = inductor.Inductor()
        monkeypatch.setattr(inductor, "compiled", self._compile)
        monkeypatch.setattr(graphs, "program_of", self._programs)

    def _compile(self, module: fx.GraphModule, fakes: Sequence[Any]) -> Any:
        self.compiled.append(module)
        return interpreted(module)

    def _fuse(self, module: fx.GraphModule, fakes: Sequence[Any]) -> Any:
        self.asked += 1
        return self._inductor.fuse(module, fakes)

    def _programs(self, *given: Any) -> program.Program:
        return program.program_of(*given, fuse=self._fuse)

    @property
    def names(self) -> list[list[str]]:
        """Ops of each segment."""
        return [
            [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
            for module in self.compiled
        ]


def gradients(training: Training) -> list[Tensor]:
    loss = training.loss(0, BATCH)
    return [loss, *torch.autograd.grad(loss, list(training.models[0].parameters()))]


def in_segments(choose: Choose) -> PlannedHost:
    """An iteration under a plan, with the bits of plain PyTorch."""
    expected, training = gradients(Training(BLOCKS)), Training(BLOCKS)
    parameters = list(training.models[0].parameters())
    carrier = hostile_carrier("threads")
    host = PlannedHost(training.models, carrier, choose)
    try:
        with compiled(training, host):
            loss = training.loss(0, BATCH)
            found = [loss, *torch.autograd.grad(loss, parameters)]
    finally:
        carrier.close()
    assert host.plans[0].decisions
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return host


@pytest.mark.parametrize("choose", [roomy, tight])
def test_segments_that_are_alike_are_compiled_once(
    choose: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = Segments(monkeypatch)
    in_segments(choose)
    seen = [(module.code, *map(str, module.graph.nodes)) for module in segments.compiled]
    assert 0 < len(seen) == len({*seen})
    if choose is tight:
        # What lies between two matrix products is in every block.
        assert len(seen) < segments.asked - DEPTH


def test_what_lies_otherwise_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.tanh.default, (graph.placeholder("x"),)),))
    module, made = fx.GraphModule({}, graph), inductor.Inductor()
    asked: list[Any] = []
    monkeypatch.setattr(inductor, "compiled", lambda module, fakes: asked.append(fakes))
    x = torch.zeros(4, 6)
    for one in (x, x.clone(), x.t(), x[1:], x[1:].clone(), x.bool(), x.to("meta"), x):
        made.fuse(module, [one])
    assert len(asked) == 6


def test_what_runs_under_other_settings_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "compiled", lambda module, _: interpreted(module))
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.tanh.default, (graph.placeholder("x"),)),))
    module, made, x = fx.GraphModule({}, graph), inductor.Inductor(), torch.zeros(4)
    first = made.fuse(module, [x])
    before, matmul = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    try:
        torch.use_deterministic_algorithms(not before)
        second = made.fuse(module, [x])
        # Without the old way to ask for it, which may not be asked then.
        matmul.fp32_precision = "ieee" if precision == "tf32" else "tf32"
        assert len({first, second, made.fuse(module, [x])}) == 3
    finally:
        torch.use_deterministic_algorithms(before)
        matmul.fp32_precision = precision
    assert made.fuse(module, [x]) is first


def test_what_could_not_be_compiled_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    module, made, answers = fx.GraphModule({}, graph), inductor.Inductor(), [interpreted, None]

    def compile_(*_: Any) -> Any:
        answer = answers.pop()
        if answer is None:
            raise OSError("no space left on device")
        return answer(module)

    monkeypatch.setattr(inductor, "compiled", compile_)
    assert made.fuse(module, [torch.zeros(4)]) is None
    assert made.fuse(module, [torch.zeros(4)]) is not None
    (note,) = made.notes
    assert "no space left" in note
    # What has no bytes to lie on is no reason to stop.
    assert made.fuse(module, [None]) is None


def test_where_memory_is_scarce_calls_of_libraries_stand_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = Segments(monkeypatch)
    in_segments(tight)
    together = Segments(monkeypatch)
    in_segments(roomy)
    # A view beside a call of a library gives a compiler nothing to do.
    for names in (*apart.names, *together.names):
        assert any(is_fused(name) and "aten.t." not in name for name in names)
    alone = [[name for name in names if "aten" in name] for names in apart.names]
    assert alone
    assert all(is_fused(name) for names in alone for name in names)
    assert any(not is_fused(name) for names in together.names for name in names)
    assert together.asked < apart.asked


class Dropped(nn.Module):
    """Dropout as GPUs have it, one op, between others that are fused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept, _ = torch.native_dropout(torch.tanh(self.first(x)).exp(), 0.25, True)
        return torch.sigmoid(kept) * kept


DROPPED = Task("dropped", lambda: [Dropped()], batch)


def test_what_draws_random_numbers_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = Segments(monkeypatch)
    of_plain, training = Training(DROPPED), Training(DROPPED)
    torch.manual_seed(5)
    expected = gradients(of_plain)
    parameters = list(training.models[0].parameters())
    carrier = hostile_carrier("threads")
    torch.manual_seed(5)
    try:
        with compiled(training, PlannedHost(training.models, carrier, roomy)):
            loss = training.loss(0, BATCH)
            found = [loss, *torch.autograd.grad(loss, parameters)]
    finally:
        carrier.close()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    names = [name for of in segments.names for name in of]
    assert {"aten.exp.default", "aten.sigmoid.default"} <= {*names}
    assert "aten.native_dropout.default" not in names


def test_memory_is_scarce_near_the_peak_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Segments(monkeypatch)
    host = in_segments(roomy)
    (drawn,), plan = host.drawn, host.plans[0]
    held = curve(drawn.trace, plan, Allocator(1, 0.0, 0))
    largest = max(it.nbytes for it in drawn.trace.storages if not it.persistent)
    beyond = orders._BEYOND * largest
    assert min(held) < max(held) - 2 * largest

    def scarce(peak: int, budget: int = 1) -> list[int]:
        whole = replace(plan, predicted_peak_bytes=peak, budget=Budget(budget))
        (found,) = orders_of(drawn, whole)
        return [
            start + op
            for start, ops in zip(drawn.starts, found.scarce, strict=True)
            for op in sorted(ops)
        ]

    peak = max(held) - 2 * largest + beyond
    near = scarce(peak)
    assert held.index(max(held)) in near
    assert held.index(min(held)) not in near
    assert scarce(max(held) + beyond) == []
    assert scarce(0) == [*range(len(held))]
    # Of a budget that is far above the peak there is enough.
    assert scarce(0, 10 * (max(held) + beyond)) == []
    assert scarce(0, int(peak / orders._FILLED) + 1) == near


def test_boundaries_are_passed_where_nothing_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    Segments(monkeypatch)
    host = in_segments(roomy)
    (drawn,), plan = host.drawn, host.plans[0]
    (before,) = orders_of(drawn, plan)
    every = range(len(drawn.trace.ops))
    told = [it for it in every if drawn.trace.ops[it].phase is not Phase.LOSS]
    (orders,) = orders_of(drawn, plan, told=told)
    for start, acts, known in zip(
        drawn.starts,
        (orders.forward, orders.backward),
        (before.forward, before.backward),
        strict=True,
    ):
        assert known.items() <= acts.items()
        assert len(acts) > len(known)
        for at, due in acts.items():
            assert due == known.get(at, [(Act.PASSED, start + at)])
    passed = {
        start + at
        for start, it in zip(drawn.starts, (orders.forward, orders.backward), strict=True)
        for at in it
    }
    assert {*told} <= passed


def test_iterations_that_are_verified_are_timed_between_movements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples: list[Sample] = []
    better = Verification.better

    def noted(self: Any, trace: Any, tried: Any, seen: Any, *more: Any) -> Any:
        samples.extend(seen)
        return better(self, trace, tried, seen, *more)

    monkeypatch.setattr(Verification, "better", noted)

    def train(budget: int) -> None:
        training = Training(CNN)
        with belady.virtualize(training.models, budget, engine="graph") as vm:
            training.run(plain, range(6))
        run = vm.run()
        assert run is not None
        assert run.plan.decisions

    at_tight_budget(train)
    assert len(samples) >= 2
    for sample in samples:
        ends = list(sample.paced)
        # From the first op to the last movement, without a gap.
        assert ends[0][0] == 0
        assert all(one[1] == two[0] for one, two in pairwise(ends))
        assert len(ends) > 2
        assert 0 < sum(sample.paced.values()) <= sample.seconds
