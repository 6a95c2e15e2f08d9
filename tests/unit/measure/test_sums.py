"""Sums of gradients: a trace shows them as autograd makes them where nothing watches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import belady
from belady.ir.curves import curve
from belady.ir.files import validate
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Phase, Tier, Trace
from belady.measure import sums
from belady.measure.probe import CPU_ALLOCATOR
from belady.measure.sums import in_place, nobody, only_holder, unwatched
from tests.unit.measure.watching import CPU, Watch, pseudo_loss

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


class Knotted(nn.Module):
    """Sums of sums: gradients that are one for several readers, and some that a hook keeps."""

    def __init__(self, seed: int, keeps: bool) -> None:
        super().__init__()
        self.draw, self.keeps, self.kept = random.Random(seed), keeps, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        known = [x.exp(), x.tanh()]
        for _ in range(12):
            first, second = (self.draw.choice(known[-4:]) for _ in range(2))
            made = self.draw.choice([first + second, first + second.tanh(), second.sigmoid()])
            if self.keeps and made.requires_grad and self.draw.random() < 0.3:
                made.register_hook(self.kept.append)
            known.append(made)
        return torch.stack([it.sin() for it in known]).sum(0)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_recorder_adds_in_place_where_autograd_does(seed: int, keeps: bool) -> None:
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    plain, seen = Knotted(seed, keeps), Knotted(seed, keeps)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    pseudo_loss(plain(inputs[0]))
    watch = Watch(seen)
    watch.recorder.alone = only_holder(CPU)
    pseudo_loss(watch.call(seen, inputs[1]))
    trace = watch.finish()
    in_place_or_not = _unwatched(Knotted(seed, keeps))
    assert _sums(trace) == in_place_or_not
    assert in_place_or_not[1] > 0
    assert torch.equal(*(it.grad for it in inputs))  # type: ignore[arg-type]
    assert len(plain.kept) == len(seen.kept) >= 2 * keeps
    assert all(map(torch.equal, plain.kept, seen.kept))


@pytest.mark.parametrize("make", [Apart, Noisy, Holding])
def test_a_recorder_writes_what_autograd_alone_holds(make: Callable[[], nn.Module]) -> None:
    watch, model = Watch(), make()
    watch.recorder.alone = only_holder(CPU)
    pseudo_loss(watch.call(model, torch.randn(SIZE, SIZE, requires_grad=True)))
    assert _sums(watch.finish()) == (1, 0)


def test_only_plain_tensors_that_are_alike_are_added_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sums, "_holders", lambda _operands: (1, 1, 1))
    holds, one = only_holder(CPU), torch.ones(4, 4)
    assert holds((one, torch.ones(4, 4)))
    assert holds((one.t(), one))
    others = [one[:2], one.double(), one.to("meta"), one.to_sparse(), nn.Parameter(one)]
    assert not any(holds((one, it)) or holds((it, one)) for it in others)
    gaps = torch.ones(8, 4)[::2]
    assert not holds((gaps, one))
    assert not holds((torch.ones(1, 4).expand(4, 4), one))
    assert holds((one, gaps))


def test_where_holders_cannot_be_counted_nothing_is_added_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(_operands: object) -> Any:
        raise AttributeError("another torch")

    monkeypatch.setattr(sums, "_holders", unknown)
    assert only_holder(CPU) is nobody


def test_holders_are_counted_whatever_the_caller_is_in() -> None:
    counted: list[Any] = []
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), Watched(counted):
        assert only_holder(CPU) is not nobody
    with torch.no_grad(), saved_tensors_hooks(counted.append, counted.append), Called(counted):
        assert only_holder(CPU) is not nobody
    assert not counted


class Called(TorchFunctionMode):
    """Sees calls."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Watched(TorchDispatchMode):
    """Sees ops."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_on_a_cpu_a_trace_is_as_watched() -> None:
    watch = Watch(model := Residual())
    pseudo_loss(watch.call(model, torch.randn(SIZE, SIZE, requires_grad=True)))
    trace, ops = watch.finish(), watch.recorder.ops
    assert _sums(unwatched(trace, ops)) == (1, 0)
    assert _sums(unwatched(replace(trace, device="cuda:0"), ops)) == (0, 1)


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


@pytest.mark.gpu
def test_an_observed_iteration_takes_no_more_than_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide() for _ in range(3))).cuda()
    x = torch.randn(64, 64, 64, 64, device="cuda")
    peaks = []
    with belady.virtualize(model, "8GiB", policy="floor", engine="eager"):
        for _ in range(8):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            model(x).square().mean().backward()
            model.zero_grad()
            peaks.append(torch.cuda.max_memory_allocated())
    assert max(peaks) <= 1.02 * peaks[-1]
