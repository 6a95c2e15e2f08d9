"""Sums of gradients: a trace shows them as autograd makes them where nothing watches."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
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
from belady.measure.sums import ADDING_NOTHING, in_place, nobody, only_holder, unwatched
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
        known = [F.gelu(x), F.silu(x)]
        for _ in range(12):
            first, second = (self.draw.choice(known[-4:]) for _ in range(2))
            made = self.draw.choice([first + second, first + F.silu(second), F.gelu(second)])
            if self.keeps and self.draw.random() < 0.3:
                made.register_hook(self.kept.append)
            known.append(made)
        return torch.cat([F.silu(it) for it in known])


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_recorder_adds_in_place_where_autograd_does(seed: int, keeps: bool) -> None:
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    plain, seen = Knotted(seed, keeps), Knotted(seed, keeps)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    pseudo_loss(plain(inputs[0]))
    trace, _ = _recorded(lambda: pseudo_loss(seen(inputs[1])))
    in_place_or_not = _unwatched(Knotted(seed, keeps))
    assert _sums(trace) == in_place_or_not
    assert in_place_or_not[1] > 0
    assert torch.equal(*(it.grad for it in inputs))  # type: ignore[arg-type]
    assert len(plain.kept) == len(seen.kept) >= 2 * keeps
    assert all(map(torch.equal, plain.kept, seen.kept))


def _recorded(run: Callable[[], Any]) -> tuple[Trace, Any]:
    """What a recorder that knows who holds what saw of ``run``, and its result."""
    watch = Watch()
    watch.recorder.alone = only_holder(CPU)
    result = run()
    return watch.finish(), result


def _kept_by_a_hook(x: Tensor) -> Any:
    """The sum's first gradient is Python's to keep."""
    kept: list[Tensor] = []
    y = F.gelu(x)
    # What is called first goes backward last.
    last = F.silu(y)
    made = y + torch.ones_like(y)
    made.register_hook(kept.append)
    return torch.autograd.grad((F.silu(made) + last).sum(), x) + tuple(kept)


def _captured(x: Tensor) -> Any:
    """The first gradient is what was asked for."""
    y = F.gelu(x)
    last = F.silu(y)
    made = y + torch.ones_like(y)
    return torch.autograd.grad((F.silu(made) + last).sum(), [x, made])


def _in_two_buffers(x: Tensor) -> Any:
    """The first gradient is that of two values."""
    y, z = F.gelu(x), F.silu(x)
    last = F.silu(y)
    made = y + z
    return torch.autograd.grad((F.silu(made) + last).sum(), x)


def _transformed(x: Tensor) -> Any:
    """Several hold what is one tensor inside."""

    def loss(inner: Tensor) -> Tensor:
        y, z = F.gelu(inner), F.silu(inner)
        last = F.silu(y)
        return (F.silu(y + z) + last).sum()

    with torch.no_grad():
        return (torch.func.grad(loss)(x.detach()),)


def _dual(x: Tensor) -> Any:
    """Gradients that carry tangents."""
    with forward_ad.dual_level():
        y = forward_ad.make_dual(x, torch.ones_like(x)).exp()
        (found,) = torch.autograd.grad((F.relu(y) * 2 + F.relu(y)).sum(), x)
        return tuple(forward_ad.unpack_dual(found))[:1]


class _Formula(torch.autograd.Function):
    """Python's sum, the first of which is used again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        first = gradient.sin()
        return (first + gradient.cos()) * first


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.parametrize(
    "run", [_kept_by_a_hook, _captured, _in_two_buffers, _transformed, _dual, _Formula.apply]
)
def test_what_is_held_elsewhere_is_left_as_it_is(run: Callable[[Tensor], Any]) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3), requires_grad=True)

    def both() -> Any:
        found = run(x)
        return found if isinstance(found, tuple) else torch.autograd.grad(found.sum(), x)

    plain = both()
    _, recorded = _recorded(both)
    assert len(plain) == len(recorded)
    assert all(map(torch.equal, plain, recorded))


IMAGES, ROWS, HEADS = (2, 4, 8, 8), (6, 8), (2, 6, 8)
NODES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "Add": (ROWS, lambda x: x + x.exp()),
    "Addmm": (ROWS, lambda x: F.linear(x, torch.ones(3, 8), torch.ones(3))),
    "AvgPool2D": (IMAGES, lambda x: F.avg_pool2d(x, 2)),
    "Bmm": (HEADS, lambda x: x.bmm(x.exp().transpose(1, 2))),
    "Cat": (ROWS, lambda x: torch.cat([x, x.exp()])),
    "Convolution": (IMAGES, lambda x: F.conv2d(x, x.exp()[:, :, :3, :3], padding=1)),
    "Gelu": (ROWS, F.gelu),
    "MaxPool2DWithIndices": (IMAGES, lambda x: F.max_pool2d(x, 2)),
    "Mm": (ROWS, lambda x: x.mm(x.exp().t())),
    "NativeBatchNorm": (IMAGES, lambda x: F.batch_norm(x, None, None, training=True)),
    "NativeLayerNorm": (ROWS, lambda x: F.layer_norm(x, (8,))),
    "Permute": (HEADS, lambda x: x.permute(2, 0, 1)),
    "Relu": (ROWS, F.relu),
    "Silu": (ROWS, F.silu),
    "T": (ROWS, lambda x: x.t()),
    "ToCopy": (ROWS, lambda x: x.double()),
    "Transpose": (HEADS, lambda x: x.transpose(0, 2)),
    "UnsafeView": (ROWS, lambda x: torch.ops.aten._unsafe_view(x, (8, 6))),
    "View": (ROWS, lambda x: x.view(8, 6)),
}


@pytest.mark.parametrize("name", sorted(ADDING_NOTHING - {"CudnnBatchNormBackward0"}))
def test_formulas_known_to_add_nothing_do_not(name: str) -> None:
    shape, run = NODES[name.removesuffix("Backward0")]
    seen = Nodes()
    y = run(torch.rand(shape, requires_grad=True).exp())
    with seen:
        y.backward(torch.ones_like(y))
    assert seen.ops[name] or name == "AddBackward0"
    assert "aten.add.Tensor" not in seen.ops[name] or _joins(y)
    assert type(y.grad_fn).__name__ == name


def _joins(y: Tensor) -> bool:
    """Whether two of the node's gradients are for one value: autograd adds them up after it."""
    return len({node for node, _ in y.grad_fn.next_functions}) < len(y.grad_fn.next_functions)  # type: ignore[union-attr]


class Nodes(TorchDispatchMode):
    """Sees what runs while which node is the current one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: defaultdict[str, list[str]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[type(torch._C._current_autograd_node()).__name__].append(str(func))
        return func(*args, **(kwargs or {}))


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


@pytest.mark.parametrize("error", [AttributeError, torch.OutOfMemoryError])
def test_where_holders_cannot_be_counted_nothing_is_added_in_place(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_operands: object) -> Any:
        raise error("another torch, or too little memory")

    monkeypatch.setattr(sums, "_holders", unknown)
    assert only_holder(CPU) is nobody


def test_who_looks_into_frames_may_hold_what_is_counted() -> None:
    before = sys.getprofile()
    sys.setprofile(lambda frame, *_: frame.f_locals and None)
    try:
        found = only_holder(CPU)
    finally:
        sys.setprofile(before)
    assert found is nobody


def test_sums_of_a_formula_are_its_own() -> None:
    x = torch.randn(8, 8, requires_grad=True)

    def deviations() -> Any:
        return torch.autograd.grad([it.sum() for it in torch.std_mean(F.gelu(x), 0)], x)

    trace, recorded = _recorded(deviations)
    assert _sums(trace)[0] > 0
    assert _sums(trace)[1] == 0
    assert torch.equal(*recorded, *deviations())


def test_holders_are_counted_whatever_the_caller_is_in() -> None:
    counted: list[Any] = []
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), Nodes() as seen:
        assert only_holder(CPU) is not nobody
    with torch.no_grad(), saved_tensors_hooks(counted.append, counted.append), Called(counted):
        assert only_holder(CPU) is not nobody
    assert not counted
    assert not seen.ops


class Called(TorchFunctionMode):
    """Sees calls."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
