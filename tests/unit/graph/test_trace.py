"""The trace of a captured graph: what it says of bytes is what happens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from belady.ir.consistency import validate
from belady.ir.curves import curve
from belady.ir.files import dumps, loads
from belady.ir.hardware import Allocator
from belady.ir.plan import Budget, Plan, Recompute
from belady.ir.trace import Phase, Source, StorageKind, Trace
from belady.measure.probe import probe
from belady.memory.carrier import Carrier
from belady.planners import plan as make_plan
from belady.planners import smallest_budget
from tests.parity.graphs import PlannedHost, compiled
from tests.support.models import CNN, GPT, INCEPTION, TIED, Task
from tests.support.training import Training
from tests.unit.graph.counting import Counter, counting

EXACT = Allocator(1, 0.0, 0)
ROOM = Budget(1 << 30)


def by_policy(trace: Trace, policy: str) -> Plan:
    machine = replace(probe(trace.device), allocator=EXACT)
    least = smallest_budget(policy, trace, machine, ROOM)
    return make_plan(policy, trace, machine, Budget(least))


def measured(task: Task, policy: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, PlannedHost]:
    """Peak of a forward and a backward under a policy's leanest plan, after one to warm up."""
    training, carrier = Training(task), Carrier("cpu")
    host = PlannedHost(training.models, carrier, lambda trace: by_policy(trace, policy))
    counter = Counter()
    try:
        with compiled(training, host):
            x, _ = training.batch(0)
            training.models[0](x)
            (model,) = host._models
            counter.track(*model.parameters(), *model.buffers(), x)
            with counting(counter, monkeypatch):
                y = training.models[0](x)
                gradient = torch.ones_like(y)
                counter.track(gradient)
                y.backward(gradient)
    finally:
        carrier.close()
    return counter.peak, host


@pytest.mark.parametrize(
    ("task", "policy"),
    [(CNN, "floor"), (GPT, "lifetime"), (INCEPTION, "floor"), (TIED, "baseline")],
    ids=str,
)
def test_the_predicted_peak_is_the_real_one(
    task: Task, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak, host = measured(task, policy, monkeypatch)
    # The next running statistics of a norm go out of the graph, and then at once; only a graph that
    # was watched knows that.
    buffers = sum(it.nbytes for model in host._models for it in model.buffers())
    assert 0 <= max(curve(host.drawn[0].trace, host.plans[0], EXACT)) - peak <= buffers


@pytest.mark.parametrize("task", [CNN, GPT], ids=str)
def test_the_peak_with_replays_is_not_above_the_predicted_one(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak, host = measured(task, "hybrid", monkeypatch)
    assert any(isinstance(it, Recompute) for it in host.plans[0].decisions.values())
    predicted = max(curve(host.drawn[0].trace, host.plans[0], EXACT))
    baseline = max(curve(host.drawn[0].trace, Plan(host.plans[0].trace, "keep/1", ROOM), EXACT))
    assert peak <= predicted < baseline


@pytest.fixture(scope="module")
def trace() -> Trace:
    training, carrier = Training(CNN), Carrier("cpu")
    host = PlannedHost(training.models, carrier, lambda t: Plan(t.fingerprint, "keep/1", ROOM))
    with compiled(training, host):
        training.models[0](training.batch(0)[0])
    carrier.close()
    return host.drawn[0].trace


def test_it_is_a_document(trace: Trace) -> None:
    validate(trace)
    assert loads(Trace, dumps(trace)) == trace
    assert trace.source is Source.GRAPH
    assert trace.anchors == ()


def test_forward_comes_before_the_loss_and_backward(trace: Trace) -> None:
    phases = list(dict.fromkeys(op.phase for op in trace.ops))
    assert phases == [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD]


def test_ops_know_their_module_and_backward_its_forward(trace: Trace) -> None:
    first = trace.ops[0]
    assert (first.name, first.module) == ("aten.convolution.default", "layers.0")
    for op in trace.ops:
        if op.name == "aten.convolution_backward.default":
            assert op.forward_op is not None
            assert trace.ops[op.forward_op].name == "aten.convolution.default"
            assert op.module == trace.ops[op.forward_op].module


def test_only_what_gives_the_same_again_is_replayable(trace: Trace) -> None:
    replayable = {op.name for op in trace.ops if op.replayable}
    assert "aten.relu.default" in replayable
    assert "aten.convolution.default" in replayable
    assert "aten._native_batch_norm_legit_functional.default" in replayable
    assert not any(op.random for op in trace.ops if op.replayable)
    assert any(op.random for op in trace.ops)
    assert all(op.phase is Phase.FORWARD for op in trace.ops if op.replayable)


def test_parameters_and_their_gradients_are_persistent(trace: Trace) -> None:
    (model,) = Training(CNN).models
    kinds = [storage.kind for storage in trace.storages]
    assert kinds.count(StorageKind.PARAMETER) == len(list(model.parameters()))
    assert kinds.count(StorageKind.GRADIENT) == len(list(model.parameters()))
    saved = {trace.storages[trace.values[it].storage].kind for it in trace.saved}
    assert saved == {StorageKind.ACTIVATION, StorageKind.INPUT}
