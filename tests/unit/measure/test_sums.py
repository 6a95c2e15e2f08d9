"""Sums of gradients: a trace shows them as autograd makes them where nothing watches."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.ir.curves import curve
from belady.ir.files import validate
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Phase, Tier, Trace
from belady.measure.probe import CPU_ALLOCATOR
from belady.measure.sums import in_place
from tests.unit.measure.watching import Watch, pseudo_loss

SIZE = 64


class Residual(nn.Module):
    """Adds what linear layers make of its input to it."""

    def __init__(self, branches: int = 1) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(branches))

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        total = y.tanh()
        for branch in self.branches:
            total = total + branch(y).relu()
        return total


class _Adding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient + 2 * gradient


class Apart(nn.Module):
    """Its backward adds by code of its own, and into nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return _Adding.apply(x.exp())  # type: ignore[no-any-return]


class Noisy(nn.Module):
    """A hook adds to a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        y.register_hook(lambda gradient: gradient + 2 * gradient)
        return y.tanh()


class Holding(nn.Module):
    """Someone else holds the first gradient until backward is over."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        other = self.linear(y).relu()
        # Made last, so that its gradient is the first.
        made = y.view(y.shape)
        made.register_hook(self.held.append)
        return made + other


def _seen(model: nn.Module) -> tuple[Trace, Trace]:
    """The trace as watched, and with its sums in place."""
    watch = Watch(model)
    pseudo_loss(watch.call(model, torch.randn(SIZE, SIZE, requires_grad=True)))
    candidates = [at for at, op in enumerate(watch.recorder.ops) if op.may_sum]
    trace = watch.finish()
    joined = in_place(trace, candidates)
    validate(joined)
    return trace, joined


def _unwatched(model: nn.Module) -> tuple[int, int]:
    """How many sums backward makes in a new tensor, and how many in place."""
    result = model(torch.randn(SIZE, SIZE, requires_grad=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        pseudo_loss(result)
    named = [event.name for event in seen.events()]
    return named.count("aten::add"), named.count("aten::add_")


def _sums(trace: Trace) -> tuple[int, int]:
    backward = [op.name for op in trace.ops if op.phase is Phase.BACKWARD]
    return backward.count("aten.add.Tensor"), backward.count("aten.add_.Tensor")


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_sums_are_made_as_where_nothing_watches(branches: int) -> None:
    watched, joined = _seen(Residual(branches))
    assert _sums(watched) == (branches, 0)
    assert _sums(joined) == _unwatched(Residual(branches)) == (0, branches)
    assert len(joined.storages) == len(watched.storages)
    held = [sum(it.nbytes > 0 for it in trace.storages) for trace in (watched, joined)]
    assert held[0] - held[1] == branches


def test_a_sum_in_place_takes_a_tensor_less() -> None:
    watched, joined = _seen(Residual())
    (at,) = (at for at, op in enumerate(joined.ops) if op.name == "aten.add_.Tensor")
    before, after = (curve(it, _kept(it), CPU_ALLOCATOR) for it in (watched, joined))
    less = [one - other for one, other in zip(before, after, strict=True)]
    assert less == [4 * SIZE * SIZE if op == at else 0 for op in range(len(less))]


@pytest.mark.parametrize("make", [Apart, Noisy, Holding])
def test_what_is_not_autograds_to_write_stays(make: Callable[[], nn.Module]) -> None:
    watched, joined = _seen(make())
    assert _sums(watched) == (1, 0)
    assert _unwatched(make()) == (1, 0)
    assert joined == watched


def test_sums_of_which_a_graph_is_made_are_in_new_tensors() -> None:
    watch, model = Watch(), Residual()
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    result = watch.call(model, x)
    torch.autograd.grad(result, x, torch.ones_like(result), create_graph=True)
    assert any(op.name == "aten.add.Tensor" for op in watch.recorder.ops)
    assert not any(op.may_sum for op in watch.recorder.ops)
    watch.finish()


def test_many_readers_of_one_tensor_take_no_time() -> None:
    watched, joined = _seen(Residual(300))
    assert _sums(watched) == (300, 0)
    begun = perf_counter()
    in_place(watched, range(len(watched.ops)))
    assert perf_counter() - begun < 1
    assert _sums(joined) == (0, 300)


def _kept(trace: Trace) -> Plan:
    return Plan(trace.fingerprint, "keep", Budget(1 << 40))


@pytest.mark.gpu
def test_the_peak_of_a_residual_network_is_as_predicted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide() for _ in range(3))).cuda()
    x = torch.randn(64, 64, 64, 64, device="cuda")
    with belady.virtualize(model, "8GiB", policy="floor") as vm:
        for _ in range(6):
            model(x).square().mean().backward()
            model.zero_grad()
        run = vm.run()
    assert run is not None
    assert run.measured is not None
    assert any(op.name == "aten.add_.Tensor" for op in run.trace.ops if op.phase is Phase.BACKWARD)
    assert run.measured.peak(Tier.DEVICE) == pytest.approx(
        run.predicted.peak(Tier.DEVICE), rel=0.01
    )


class Wide(nn.Module):
    """A residual block whose backward holds most where it adds up gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(64, 8, 1), nn.ReLU(), nn.Conv2d(8, 64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + self.inner(x)
