"""What goes wrong in an iteration, and every kind of saved tensor: as in plain PyTorch.

The letters and numbers are rows of the matrix of faults that this project keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

import belady
from belady.eager.save_on import _carrier
from belady.ir.timeline import Lane
from belady.ir.trace import Tier
from belady.memory.carrier import Carrier
from tests.support.memory import random_bytes
from tests.support.models import CNN, TIED, Task
from tests.support.training import Step, Training, differences, plain, repeatable

TIERS = ("host", "disk", "encoded", "device")
ROOM = "1GiB"
ITERATIONS = range(5)
# One iteration that is observed, one that is planned.
FAULTY = (1, 3)

tiers = pytest.mark.parametrize("tier", TIERS)


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with repeatable():
        yield


# -- X: the training step ------------------------------------------------------------------------


class OnPurpose(Exception):
    """Nobody's mistake."""


def fail(*_: Any) -> None:
    raise OnPurpose


def finish(training: Training, loss: Tensor) -> list[Tensor]:
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def x1_exception_in_forward_hook(training: Training, _index: int) -> list[Tensor]:
    handle = training.model.layers[4].register_forward_hook(fail)
    with pytest.raises(OnPurpose):
        training.loss(0)
    handle.remove()
    return []


def x1_exception_in_loss(training: Training, index: int) -> list[Tensor]:
    x, y = training.batch(index)
    with pytest.raises(IndexError):
        training.task.loss(training.model(x), y + 1000)
    return []


def x2_exception_in_backward(training: Training, index: int) -> list[Tensor]:
    """Leave gradients half made, and step with them."""
    loss = training.loss(index)
    handle = training.model.layers[4].second.weight.register_hook(fail)
    with pytest.raises(OnPurpose):
        loss.backward()
    handle.remove()
    training.optimizer.step()
    return [loss]


def x3_exception_in_step(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)
    loss.backward()
    handle = training.optimizer.register_step_pre_hook(fail)
    with pytest.raises(OnPurpose):
        training.optimizer.step()
    handle.remove()
    return [loss]


def x3_exception_in_closure(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)

    def closure() -> Tensor:
        loss.backward()
        raise OnPurpose

    with pytest.raises(OnPurpose):
        training.optimizer.step(closure)
    return [loss]


def x5_backward_twice(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    training.optimizer.step()
    return [loss]


def x6_graph_retained(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)
    for _ in range(3):
        loss.backward(retain_graph=True)
    return finish(training, loss)


def x7_gradient_penalty(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)
    gradients = torch.autograd.grad(loss, list(training.model.parameters()), create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in gradients)
    return finish(training, loss + 0.1 * penalty)


def x8_inference_between(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)
    with torch.inference_mode():
        seen = training.loss(index + 1)
    return [seen, *finish(training, loss)]


def _in_order(order: tuple[int, ...], training: Training, index: int) -> list[Tensor]:
    losses = [training.loss(3 * index + i) for i in range(3)]
    for i in order:
        losses[i].backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return losses


def x9_last_in_first_out(training: Training, index: int) -> list[Tensor]:
    return _in_order((2, 1, 0), training, index)


def x9_first_in_first_out(training: Training, index: int) -> list[Tensor]:
    return _in_order((0, 1, 2), training, index)


def x9_shuffled(training: Training, index: int) -> list[Tensor]:
    return _in_order((1, 2, 0), training, index)


def x11_gradient_of_some_inputs(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)
    last = list(training.model.parameters())[-1]
    (gradient,) = torch.autograd.grad(loss, [last])
    with torch.no_grad():
        last -= 0.1 * gradient
    return [loss, gradient]


def x11_some_outputs_first(training: Training, index: int) -> list[Tensor]:
    x, y = training.batch(index)
    result = training.model(x)
    halves = [F.cross_entropy(result[:4], y[:4]), F.cross_entropy(result[4:], y[4:])]
    halves[1].backward(retain_graph=True)
    return [halves[1], *finish(training, halves[0])]


def a3_step_between(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)
    loss.backward(retain_graph=True)
    training.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return [loss]


EVENTS: tuple[Step, ...] = (
    x1_exception_in_forward_hook,
    x1_exception_in_loss,
    x2_exception_in_backward,
    x3_exception_in_step,
    x3_exception_in_closure,
    x5_backward_twice,
    x6_graph_retained,
    x7_gradient_penalty,
    x8_inference_between,
    x9_last_in_first_out,
    x9_first_in_first_out,
    x9_shuffled,
    x11_gradient_of_some_inputs,
    x11_some_outputs_first,
    a3_step_between,
)


def now_and_then(event: Step) -> Step:
    """An iteration that is plain, but for the faulty ones: then the event comes before it."""

    def step(training: Training, index: int) -> list[Tensor]:
        before = event(training, index) if index in FAULTY else []
        return before + plain(training, index)

    return step


def every_time(event: Step) -> Step:
    """An iteration that is the event, so that plans are made for it."""
    return event


def compare(task: Task, step: Step) -> None:
    expected = Training(task).run(step, ITERATIONS).outcome()
    training = Training(task)
    with belady.virtualize(training.models, ROOM, policy="floor"):
        training.run(step, ITERATIONS)
    assert differences(expected, training.outcome()) == []


@pytest.mark.parametrize("when", [now_and_then, every_time])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_event_in_training(event: Step, when: Callable[[Step], Step]) -> None:
    compare(CNN, when(event))


def test_x1_exceptions_come_out_unchanged() -> None:
    error = KeyError("the very one")

    def refuse(*_: Any) -> None:
        raise error

    training = Training(CNN)
    with belady.virtualize(training.models, ROOM, policy="floor"):
        for _ in range(5):
            training.run(plain, [0])
            handle = training.model.layers[5].register_forward_pre_hook(refuse)
            with pytest.raises(KeyError) as raised:
                training.loss(0)
            handle.remove()
            assert raised.value is error
            assert error.__cause__ is None


@pytest.mark.parametrize(
    "parametrized", [parametrizations.weight_norm, parametrizations.orthogonal]
)
def test_t12_parametrized_weights(parametrized: Callable[[nn.Module], nn.Module]) -> None:
    def models() -> list[nn.Module]:
        (model,) = TIED.models()
        parametrized(model.shared)
        return [model]

    compare(Task("parametrized", models, TIED.batch), plain)


# -- X, A: one graph, without a plan --------------------------------------------------------------


def gradients(program: Callable[[Tensor], Tensor], tier: str | None) -> list[Tensor]:
    """Gradient of a program by its input of 64 × 64, which `tier` holds for backward."""
    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)
    if tier is None:
        result = program(x)
    else:
        with belady.save_on(tier):
            result = program(x)
    return list(torch.autograd.grad(result.sum(), [x]))


def held_bytes() -> int:
    carrier = _carrier(torch.device("cpu"))
    return carrier.host_bytes + carrier.disk_bytes


@tiers
def test_x4_nothing_is_held_for_a_graph_that_is_gone(tier: str) -> None:
    before = held_bytes()
    x = torch.randn(64, 64, requires_grad=True)
    with belady.save_on(tier):
        result = x.exp().sin().exp()
    if tier in ("host", "disk"):
        assert held_bytes() > before
    storage = StorageWeakRef(result.untyped_storage())
    del result
    assert storage.expired()
    assert held_bytes() == before


def test_x4_memory_that_was_spilled_is_free_at_once() -> None:
    carrier = Carrier("cpu")
    for seed in range(300):
        source = random_bytes(4096, seed=seed)
        storage = StorageWeakRef(source.untyped_storage())
        parcel = carrier.send(source, Tier.DISK)
        parcel.wait_sent()
        del source
        assert storage.expired()
    carrier.close()


@tiers
def test_x12_backward_inside_the_block(tier: str) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with belady.save_on(tier):
        y = x.exp()
        (found,) = torch.autograd.grad((y[62] * y[5]).sum(), x)
    (expected,) = torch.autograd.grad((x.exp()[62] * x.exp()[5]).sum(), x)
    assert torch.equal(found, expected)


@tiers
def test_x6_nothing_is_held_once_a_retained_graph_dies(tier: str) -> None:
    before = held_bytes()
    x = torch.randn(64, 64, requires_grad=True)
    with belady.save_on(tier):
        result = x.exp().sin().sum()
    first = torch.autograd.grad(result, x, retain_graph=True)
    again = torch.autograd.grad(result, x, retain_graph=True)
    assert torch.equal(*first, *again)
    del result
    assert held_bytes() == before


def write_base_through_view(x: Tensor) -> Tensor:
    y = x * 1
    result = y.sin()
    y[3].zero_()
    return result


def write_view_through_base(x: Tensor) -> Tensor:
    y = x * 1
    result = y[3].sin()
    y.zero_()
    return result


def write_saved_output(x: Tensor) -> Tensor:
    result = x.exp()
    result.add_(1)
    return result


def write_detached_alias(x: Tensor) -> Tensor:
    y = x * 1
    result = y.sin()
    y.detach().zero_()
    return result


@tiers
@pytest.mark.parametrize(
    "program",
    [write_base_through_view, write_view_through_base, write_saved_output, write_detached_alias],
)
def test_a1_a2_a_stale_value_raises(program: Callable[[Tensor], Tensor], tier: str) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(program, None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(program, tier)


def many_views(x: Tensor) -> Tensor:
    y = x * 1
    return y @ y.t() + y * y.t() + y[:, 1:].square().sum() + y.view(-1)[::2].sin().sum()


def addresses_used_again(x: Tensor) -> Tensor:
    total = torch.zeros(())
    for i in range(40):
        total = total + (x * i).sin().mul(0.5).cos().sum()
    return total


class Everything(torch.autograd.Function):
    """Saves an input, an output and an intermediate, and hides one in an attribute (A6)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flag: bool) -> tuple[Tensor, Tensor]:
        inner, result, index = x.cos(), x.exp(), x.argmax(1)
        ctx.save_for_backward(x, result, inner, index)
        ctx.hidden = inner + 1
        ctx.mark_non_differentiable(index)
        return result, index

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
        x, result, inner, index = ctx.saved_tensors
        scale = x.gather(1, index[:, None])
        return gradient * (result + inner.sin() * ctx.hidden) * scale, None


def custom_function(x: Tensor) -> Tensor:
    result, index = Everything.apply(x * 2, True)
    return result.gather(1, index[:, None])


@tiers
@pytest.mark.parametrize("program", [many_views, addresses_used_again, custom_function])
def test_a4_a5_a6_gradients_are_those_of_plain_pytorch(
    program: Callable[[Tensor], Tensor], tier: str
) -> None:
    assert torch.equal(*gradients(program, None), *gradients(program, tier))


def copied_bytes(lane: Lane, program: Callable[[Tensor], Tensor], tier: str) -> int:
    carrier = _carrier(torch.device("cpu"))
    carrier.reset_counters()
    gradients(program, tier)
    moved = carrier.counters.get(lane)
    return 0 if moved is None else moved.nbytes


def test_a4_a_storage_saved_by_many_views_is_copied_once() -> None:
    def views(x: Tensor) -> Tensor:
        y = x * 1
        return y @ y.t() + y * y.t() + y.t() * 3

    assert copied_bytes(Lane.COPY_OUT, views, "host") == 64 * 64 * 4


def test_a8_numbers_are_not_saved() -> None:
    assert copied_bytes(Lane.COPY_OUT, lambda x: 3 * x * 2.5 + 1, "host") == 0


def test_t12_parameters_are_not_copied() -> None:
    layer = nn.Linear(64, 64, bias=False)
    # Of a linear layer autograd saves the input and a view of the weight.
    assert copied_bytes(Lane.COPY_OUT, lambda x: layer(layer(x)), "host") == 2 * 64 * 64 * 4


class Spoiling(torch.autograd.Function):
    """Its backward writes to what it was handed (A7)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (derivative,) = ctx.saved_tensors
        return derivative.mul_(gradient)


@tiers
def test_a7_a_backward_that_spoils_its_values_never_gives_other_numbers(tier: str) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with belady.save_on(tier):
        result = Spoiling.apply(x)
    weight = torch.full_like(x, 2.0)
    (first,) = torch.autograd.grad(result, x, weight, retain_graph=True)
    assert torch.equal(first, 2 * x.cos())
    # Either the stored copy is unharmed, or it is said that there is none.
    with suppress(belady.StaleValueError):
        assert torch.equal(*torch.autograd.grad(result, x, weight), 2 * x.cos())


# -- T: kinds of tensors -------------------------------------------------------------------------


class Look(torch.autograd.Function):
    """Saves a tensor and shows what comes back."""

    seen: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (Look.seen,) = ctx.saved_tensors
        return gradient, None


def returned(tensor: Tensor, tier: str) -> Tensor:
    """What backward gets for ``tensor``, of which nothing else is left by then."""
    x = torch.ones((), requires_grad=True)
    with belady.save_on(tier):
        result = Look.apply(x, tensor)
    del tensor
    result.backward()
    return Look.seen


def bits(tensor: Tensor) -> list[list[int]]:
    """Every element as its bytes; conjugate and negative bits unresolved."""
    flat = tensor.conj() if tensor.is_conj() else tensor
    flat = flat._neg_view() if flat.is_neg() else flat
    dense = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    rows: list[list[int]] = dense.view(-1).view(torch.uint8).tolist()
    return rows


def base(dtype: torch.dtype = torch.float32, count: int = 720) -> Tensor:
    """Bytes that are all different in places, seen as ``dtype``."""
    generator = torch.Generator().manual_seed(1)
    if dtype is torch.bool:
        return torch.randint(2, (count,), generator=generator) > 0
    size = count * dtype.itemsize
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator).view(dtype)


def _negative(dtype: torch.dtype) -> Tensor:
    return torch._neg_view(base(dtype).view(30, 24))


GEOMETRIES: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: base().view(30, 24).t(),
    "sliced": lambda: base().view(30, 24)[3:, 1::2],
    "far end of a large storage": lambda: base()[-7:],
    "every third": lambda: base()[2::3],
    "channels last": lambda: base().view(2, 3, 10, 12).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: (
        base().view(2, 3, 2, 10, 6).to(memory_format=torch.channels_last_3d)
    ),
    "odd strides of size one": lambda: base().as_strided((1, 24, 1), (7, 1, 99)),
    "expanded": lambda: base()[:24].expand(30, 24),
    "expanded scalar": lambda: base()[5].expand(30, 24),
    "overlapping": lambda: base().as_strided((20, 10), (3, 1), 4),
    "empty": lambda: torch.empty(0, 5),
    "empty slice": lambda: base()[10:10],
    "scalar": lambda: torch.tensor(3.25),
    "scalar far in": lambda: base()[700],
    "conjugate": lambda: base(torch.complex64, 120).view(10, 12).conj(),
    "conjugate, transposed": lambda: base(torch.complex128, 120).view(10, 12).mH,
    "negative": lambda: _negative(torch.float32),
    "imaginary part of a conjugate": lambda: base(torch.complex64, 120).conj().imag,
    "real part": lambda: base(torch.complex64, 120).real,
    "whole numbers far in": lambda: torch.arange(720)[100:],
    "as another type": lambda: base(torch.int32).view(torch.int16)[1::2],
}


@tiers
@pytest.mark.parametrize("name", GEOMETRIES)
def test_t1_to_t4_geometry_and_bits_come_back(name: str, tier: str) -> None:
    make = GEOMETRIES[name]
    expected, found = make(), returned(make(), tier)
    assert bits(found) == bits(expected)
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    assert found.is_conj() == expected.is_conj()
    assert found.is_neg() == expected.is_neg()


DTYPES = [
    getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
        "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    )
]  # fmt: skip


@tiers
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_t5_t6_every_type_and_every_bit_pattern_comes_back(dtype: torch.dtype, tier: str) -> None:
    # Random bytes hold NaN with payloads, infinities, denormals and negative zeros.
    found = returned(base(dtype), tier)
    assert found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), base(dtype).view(torch.uint8))


@tiers
@pytest.mark.parametrize("value", [float("nan"), -0.0, 1e-42, float("inf")])
def test_t6_special_numbers_come_back(value: float, tier: str) -> None:
    tensor = torch.full((64,), value)
    assert bits(returned(tensor.clone(), tier)) == bits(tensor)


def _sparse(layout: torch.layout) -> Tensor:
    dense = torch.relu(base(torch.float32, 64).nan_to_num(0, 1, -1).view(8, 8))
    if layout is torch.sparse_coo:
        return dense.to_sparse()
    if layout in (torch.sparse_bsr, torch.sparse_bsc):
        return dense.to_sparse(layout=layout, blocksize=(2, 2))
    return dense.to_sparse(layout=layout)


LAYOUTS = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)


@tiers
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_t7_sparse_tensors_come_back(layout: torch.layout, tier: str) -> None:
    found = returned(_sparse(layout), tier)
    assert found.layout is layout
    assert torch.equal(found.to_dense(), _sparse(layout).to_dense())


@tiers
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_t7_nested_tensors_come_back(layout: torch.layout, tier: str) -> None:
    rows = [torch.arange(3.0, requires_grad=True), torch.arange(5.0, requires_grad=True)]
    with belady.save_on(tier):
        result = torch.nested.as_nested_tensor(rows, layout=layout).sin()
    sum(row.sum() for row in result.unbind()).backward()
    assert all(torch.equal(row.grad, row.cos()) for row in rows)


@tiers
def test_t8_subclasses_come_back_whole(tier: str) -> None:
    found = returned(TwoTensor(torch.arange(64.0), torch.arange(64.0) + 1), tier)
    assert type(found) is TwoTensor
    assert torch.equal(found.a, torch.arange(64.0))
    assert torch.equal(found.b, torch.arange(64.0) + 1)


@tiers
def test_t3_t10_what_is_on_no_device_passes_through(tier: str) -> None:
    found = returned(torch.empty(64, 64, device="meta"), tier)
    assert found.is_meta
    assert found.shape == (64, 64)
