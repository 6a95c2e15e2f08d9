"""Convolutions are made to do with less workspace, and what that took is in the trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from belady.ir.trace import Algorithm, Trace
from belady.measure import algorithms
from belady.measure.algorithms import LITTLE, Algorithms, with_beside
from belady.measure.clock import CpuClock
from belady.measure.observe import undisturbed
from belady.memory.allowance import pages
from belady.planners.workspace import LEAN, USUAL
from tests.unit.measure.watching import CPU, Watch, observed, pseudo_loss

MIB = 2**20
GIB = 2**30


@dataclass
class Cudnn:
    """What cuDNN names for each convolution, in its order, and what is chosen of it.

    ``limits`` are the bytes beyond the outputs that were allowed, each once for every trial.
    """

    workspaces: tuple[int, ...]
    limits: list[int] = field(default_factory=list)
    chosen: int = 0
    limited: bool = False

    def choose(self) -> int:
        """Workspace of a run; what worked before is kept."""
        if self.limited:
            fitting = [it for it in (self.chosen, *self.workspaces) if 0 <= it <= self.limits[-1]]
            if not fitting:
                raise RuntimeError("unable to find an engine to execute this computation")
            self.chosen = fitting[0]
            return self.chosen
        return self.workspaces[0]

    @contextmanager
    def limit(self, device: torch.device, nbytes: int) -> Iterator[None]:
        assert device == CPU
        assert torch.backends.cudnn.deterministic
        self.limits.append(nbytes - pages(1))
        self.limited = True
        try:
            yield
        finally:
            self.limited = False


class Clock(CpuClock):
    """Sees the workspace that was chosen, and fails as the op would."""

    def __init__(self, cudnn: Cudnn) -> None:
        super().__init__()
        self.cudnn = cudnn

    def start(self) -> None:
        self.cudnn.choose()
        super().start()

    def stop(self) -> None:
        super().stop()
        self.workspace = self.cudnn.chosen if self.cudnn.limited else self.cudnn.workspaces[0]

    def results(self) -> list[tuple[float, int]]:
        return [(seconds, self.cudnn.workspaces[0]) for seconds in self.seconds]


def watched(model: nn.Module, x: Tensor, cudnn: Cudnn) -> tuple[Trace, Algorithms]:
    watch = Watch(model)
    cudnn.chosen = -1
    watch.recorder.clock = Clock(cudnn)
    it = watch.recorder.algorithms = Algorithms(CPU, Clock(cudnn), limit=cudnn.limit)
    pseudo_loss(watch.call(model, x))
    return watch.finish(), it


def conv(**options: int) -> nn.Conv2d:
    return nn.Conv2d(2, 2, 3, padding=1, bias=False, **options)


@pytest.fixture
def x() -> Tensor:
    return torch.rand(1, 2, 8, 8)


def test_a_trial_asks_for_less_and_less(x: Tensor) -> None:
    cudnn = Cudnn((GIB, 100 * MIB, 70 * MIB, MIB))
    trace, _ = watched(conv(), x, cudnn)
    (forward, *_) = [op for op in trace.ops if op.name == "aten.convolution.default"]
    assert {it.name: it.workspace_bytes for it in forward.algorithms} == {USUAL: GIB, LEAN: MIB}
    assert cudnn.limits[:2] == [GIB // 8, 100 * MIB // 8]
    assert not torch.backends.cudnn.deterministic


def test_where_nothing_leaner_exists_the_last_that_worked_counts(x: Tensor) -> None:
    cudnn = Cudnn((GIB, 90 * MIB))
    trace, _ = watched(conv(), x, cudnn)
    lean = next(it for it in trace.ops[0].algorithms if it.name == LEAN)
    assert lean.workspace_bytes == 90 * MIB
    assert cudnn.limits[:2] == [GIB // 8, 90 * MIB // 8]


@pytest.mark.parametrize("workspaces", [(GIB,), (GIB, GIB // 2), (LITTLE - 1, 0)])
def test_no_alternative(x: Tensor, workspaces: tuple[int, ...]) -> None:
    trace, it = watched(conv(), x, Cudnn(workspaces))
    assert it.found() == {}
    assert all(op.algorithms == () for op in trace.ops)


def test_backward_has_its_own_and_other_ops_have_none(x: Tensor) -> None:
    model = nn.Sequential(conv(), nn.ReLU(), conv())
    trace, _ = watched(model, x, Cudnn((GIB, 0)))
    with_a_choice = {op.name for op in trace.ops if op.algorithms}
    assert with_a_choice == {"aten.convolution.default", "aten.convolution_backward.default"}
    assert all(len(op.algorithms) == 2 for op in trace.ops if "convolution" in op.name)


def test_calls_of_the_same_shapes_are_tried_once(x: Tensor) -> None:
    cudnn = Cudnn((GIB, 0))
    trace, _ = watched(nn.Sequential(conv(), conv(), conv()), x, cudnn)
    # The first does not ask for its input's gradient.
    assert len(cudnn.limits) == 3
    assert sum(bool(op.algorithms) for op in trace.ops) == 6


def test_what_would_not_matter_is_not_tried(x: Tensor) -> None:
    cudnn = Cudnn((GIB, 0))
    model = conv()
    watch = Watch(model)
    cudnn.chosen = -1
    watch.recorder.clock = Clock(cudnn)
    watch.recorder.algorithms = Algorithms(CPU, Clock(cudnn), 2 * GIB, cudnn.limit)
    pseudo_loss(watch.call(model, x))
    assert not any(op.algorithms for op in watch.finish().ops)
    assert cudnn.limits == []


def test_trials_end_when_they_have_taken_long(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 100, 2))
    monkeypatch.setattr(algorithms, "perf_counter", lambda: next(seconds))
    model = nn.Sequential(*(conv(stride=stride) for stride in (1, 2, 3)))
    trace, _ = watched(model, x, Cudnn((GIB, 0)))
    tried = [bool(op.algorithms) for op in trace.ops if op.name == "aten.convolution.default"]
    assert tried == [True, True, False]


def test_dilated_convolutions_rule_all_out(x: Tensor) -> None:
    dilated = nn.Conv2d(2, 2, 3, padding=2, dilation=2)
    trace, _ = watched(nn.Sequential(conv(), dilated), x, Cudnn((GIB, 0)))
    assert not any(op.algorithms for op in trace.ops)


def test_trials_leave_results_alone(x: Tensor) -> None:
    model = nn.Sequential(conv(), nn.Tanh(), conv())
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    watch = Watch(model)
    cudnn = Cudnn((GIB, 0), chosen=-1)
    watch.recorder.clock = Clock(cudnn)
    watch.recorder.algorithms = Algorithms(CPU, Clock(cudnn), limit=cudnn.limit)
    watch.call(model, x).sum().backward()
    watch.finish()
    assert cudnn.limits
    assert all(
        torch.equal(p.grad, one)
        for p, one in zip(model.parameters(), expected, strict=True)
        if p.grad is not None
    )


def test_the_usual_way_takes_what_the_op_takes_by_two_observations(x: Tensor) -> None:
    trace, _ = watched(conv(), x, Cudnn((GIB, 0)))
    op = trace.ops[0]
    (lean,) = (it for it in op.algorithms if it.name == LEAN)
    sooner = Algorithm(USUAL, lean.device_seconds / 2, GIB)
    other = replace(op, device_seconds=sooner.device_seconds)
    before = replace(trace, ops=(other, *trace.ops[1:]))
    assert undisturbed(trace, before).ops[0].algorithms == (sooner, lean)


# -- what all convolutions take where the choices beside hold --------------------------------------


def taking(trace: Trace, workspace_bytes: int) -> Trace:
    """The same, as it runs when every op takes that workspace and a second."""
    ops = [replace(it, device_seconds=1.0, workspace_bytes=workspace_bytes) for it in trace.ops]
    return replace(trace, ops=tuple(ops))


def test_an_iteration_tells_what_every_convolution_took(x: Tensor) -> None:
    trace = taking(observed(nn.Sequential(conv(), nn.Tanh(), conv()), x), GIB)
    # Values that are made again are ops of the iteration that is seen, and not of the trace.
    seen = taking(observed(nn.Sequential(conv(), nn.Tanh(), nn.Tanh(), conv()), x), MIB)
    seen = replace(seen, ops=tuple(replace(it, device_seconds=2.0) for it in seen.ops))
    learned = with_beside(trace, seen)
    assert learned is not None
    assert learned.fingerprint == trace.fingerprint
    both = (Algorithm(USUAL, 1.0, GIB), Algorithm(LEAN, 2.0, MIB))
    known = [it.algorithms for it in learned.ops if "convolution" in it.name]
    assert known == [both] * 4
    assert not any(it.algorithms for it in learned.ops if "convolution" not in it.name)


def test_what_was_seen_takes_the_place_of_what_a_trial_found(x: Tensor) -> None:
    trace, _ = watched(conv(), x, Cudnn((GIB, 0)))
    learned = with_beside(trace, taking(trace, 3 * GIB))
    assert learned is not None
    found = {it.name: it.workspace_bytes for it in learned.ops[0].algorithms}
    assert found == {USUAL: GIB, LEAN: 3 * GIB}


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(conv()),
        nn.Sequential(conv(), conv(), conv()),
        nn.Sequential(conv(), conv(stride=2)),
        nn.Sequential(conv(), nn.Tanh()),
    ],
)
def test_another_iteration_tells_nothing(x: Tensor, other: nn.Module) -> None:
    assert with_beside(observed(nn.Sequential(conv(), conv()), x), observed(other, x)) is None


def test_without_convolutions_there_is_nothing_to_tell(x: Tensor) -> None:
    trace = observed(nn.Sequential(nn.Linear(8, 8)), x)
    assert with_beside(trace, trace) is None
