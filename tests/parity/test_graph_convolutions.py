"""Convolutions of captured graphs whose algorithms cuDNN finds by trying, and replays of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import belady
from belady.graph import convolutions
from belady.ir.plan import Plan, Recompute
from belady.ir.run import Run
from belady.ir.trace import Source, Trace
from tests.parity.test_graph_shortcuts import images
from tests.support.models import Task
from tests.support.training import Training, differences, plain

ITERATIONS = range(6)
CONVOLUTION = "aten.convolution.default"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Convolutions(nn.Module):
    """Two, whose results SiLU saves; the second SiLU's own result is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return silu(self.second(silu(self.first(x)))).mean((2, 3))


CONVOLUTIONS = Task("convolutions", lambda: [Convolutions()], images)


def trained(device: str, *, exact: bool = False) -> tuple[Run, list[str]]:
    expected = Training(CONVOLUTIONS, device).run(plain, ITERATIONS).outcome()
    training = Training(CONVOLUTIONS, device)
    with belady.virtualize(training.models, "1GiB", engine="graph", exact=exact) as vm:
        training.run(plain, ITERATIONS)
        run = vm.run()
    assert run is not None
    assert run.trace.source is Source.GRAPH
    return run, differences(expected, training.outcome())


def run_again(run: Run) -> set[str]:
    """Names of the ops that the plan runs again."""
    chosen = (it for it in run.plan.decisions.values() if isinstance(it, Recompute))
    return {run.trace.ops[op].name for replay in chosen for op in replay.ops}


def as_if_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a CPU's convolutions for such whose algorithms are found by trying."""

    def varies(trace: Trace, op: int) -> bool:
        return trace.ops[op].name == CONVOLUTION

    monkeypatch.setattr(convolutions, "_varies", varies)


def test_replayed_convolutions_are_said(
    replaying: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_tried(monkeypatch)
    run, wrong = trained("cpu")
    assert wrong == []
    assert CONVOLUTION in run_again(run)
    assert run.plan.numerics == ("replayed convolutions",)
    assert [note for note in run.notes if "each thread finds its own algorithms" in note]


def test_exact_replays_none(replaying: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_tried(monkeypatch)
    run, wrong = trained("cpu", exact=True)
    assert wrong == []
    assert "aten.silu.default" in run_again(run)
    assert CONVOLUTION not in run_again(run)
    assert run.plan.numerics == ()
    assert run.notes == ()


def test_convolutions_of_a_cpu_are_not_tried(replaying: list[Plan]) -> None:
    with torch.backends.cudnn.flags(benchmark=True):
        run, wrong = trained("cpu", exact=True)
    assert wrong == []
    assert CONVOLUTION in run_again(run)
    assert run.plan.numerics == ()


@pytest.mark.parametrize("benchmark", [False, True])
def test_only_what_cudnn_tries_varies(replaying: list[Plan], benchmark: bool) -> None:
    run, _ = trained("cpu")
    trace = replace(run.trace, device="cuda")
    names = {op.name for op in trace.ops if op.replayable}
    with torch.backends.cudnn.flags(benchmark=benchmark):
        kept = {op.name for op in convolutions.kept(trace).ops if op.replayable}
        told = convolutions.told(trace, run.plan)
        assert convolutions.told(trace, told) == told
    assert kept == names - ({CONVOLUTION} if benchmark else set())
    assert told.numerics == ((convolutions.REPLAYED,) if benchmark else ())


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [False, True])
def test_what_cudnn_tries_on_a_gpu(replaying: list[Plan], exact: bool) -> None:
    with torch.backends.cudnn.flags(benchmark=True, deterministic=True):
        run, wrong = trained("cuda", exact=exact)
    assert (CONVOLUTION in run_again(run)) is not exact
    assert run.plan.numerics == (() if exact else (convolutions.REPLAYED,))
    if exact:
        assert wrong == []
