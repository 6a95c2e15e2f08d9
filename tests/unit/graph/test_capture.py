"""A captured graph keeps autograd's lifetimes, and says what it cannot carry out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from belady.errors import GraphError, StaleValueError
from belady.graph.capture import backend_of
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.memory.carrier import Carrier
from tests.parity.graphs import PlannedHost


@pytest.fixture
def carrier() -> Iterator[Carrier]:
    carrier = Carrier("cpu")
    yield carrier
    carrier.close()
    torch._dynamo.reset()


def keep(trace: Trace) -> Plan:
    return Plan(trace.fingerprint, "keep/1", Budget(1 << 30))


def compiled(model: nn.Module, carrier: Carrier) -> tuple[nn.Module, PlannedHost]:
    host = PlannedHost([model], carrier, keep)
    return torch.compile(model, backend=backend_of(host), dynamic=False), host


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.Sigmoid())


def gradients(model: nn.Module, run: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(run(x).square().sum(), list(model.parameters())))


def test_it_gives_the_gradients_of_plain_pytorch(carrier: Carrier) -> None:
    model = mlp()
    x = torch.randn(5, 8)
    run, _ = compiled(model, carrier)
    for mine, plain in zip(gradients(model, run, x), gradients(model, model, x), strict=True):
        assert torch.equal(mine, plain)


def test_what_is_saved_goes_with_the_graph(carrier: Carrier) -> None:
    model = mlp()
    run, _ = compiled(model, carrier)
    y = run(torch.randn(5, 8))
    state = weakref.ref(_state_of(y))
    assert state() is not None
    gc.disable()
    try:
        del y
        assert state() is None
    finally:
        gc.enable()


def test_what_is_saved_goes_as_backward_goes(carrier: Carrier) -> None:
    model = mlp()
    run, _ = compiled(model, carrier)
    y = run(torch.randn(5, 8))
    state = _state_of(y)
    y.sum().backward()
    assert state._saved is None


def test_a_second_backward_is_for_who_asked_to_keep_the_graph(carrier: Carrier) -> None:
    model = mlp()
    run, _ = compiled(model, carrier)
    loss = run(torch.randn(5, 8)).sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, list(model.parameters()))


def test_a_weight_changed_before_backward_raises(carrier: Carrier) -> None:
    model = mlp()
    run, _ = compiled(model, carrier)
    loss = run(torch.randn(5, 8)).sum()
    with torch.no_grad():
        model[2].weight.add_(1)
    with pytest.raises(StaleValueError, match="modified by an inplace operation"):
        loss.backward()


def test_a_result_changed_before_backward_raises(carrier: Carrier) -> None:
    model = mlp()
    run, _ = compiled(model, carrier)
    y = run(torch.randn(5, 8))
    loss = y.sum()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(StaleValueError, match="modified by an inplace operation"):
        loss.backward()


def test_eval_runs_too(carrier: Carrier) -> None:
    model = mlp()
    run, _ = compiled(model, carrier)
    x = torch.randn(5, 8)
    with torch.no_grad():
        assert torch.equal(run(x), model(x))


def test_a_tensor_made_in_forward_is_part_of_the_graph(carrier: Carrier) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight * torch.tensor([1.0, 2.0, 3.0])).exp()

    model, x = Scaled(), torch.randn(2, 3)
    run, host = compiled(model, carrier)
    assert torch.equal(gradients(model, run, x)[0], gradients(model, model, x)[0])
    assert host.reasons == []


def test_a_size_that_is_not_fixed_runs_as_plain_pytorch(carrier: Carrier) -> None:
    model = mlp()
    host = PlannedHost([model], carrier, keep)
    run = torch.compile(model, backend=backend_of(host), dynamic=True)
    x = torch.randn(5, 8)
    assert torch.equal(gradients(model, run, x)[0], gradients(model, model, x)[0])
    assert "not fixed" in host.reasons[0]
    assert host.plans == []


class Interpolated(nn.Module):
    """Ops of which torch holds other versions for tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.conv(x), 0.3)
        return F.interpolate(x, scale_factor=1.7, mode="bilinear").square()


def test_ops_that_tracing_would_take_apart_keep_their_bits(carrier: Carrier) -> None:
    model, x = Interpolated(), torch.randn(2, 3, 9, 9)
    run, host = compiled(model, carrier)
    run(x)
    assert host.reasons == []
    torch.manual_seed(1)
    expected = gradients(model, model, x)
    torch.manual_seed(1)
    assert all(map(torch.equal, gradients(model, run, x), expected))


def test_torch_has_its_own_versions_of_ops_again(carrier: Carrier) -> None:
    op = torch.ops.aten.upsample_bilinear2d.vec
    before = dict(op.py_kernels)
    assert torch._C.DispatchKey.Autograd in before
    run, _ = compiled(Interpolated(), carrier)
    run(torch.randn(2, 3, 9, 9))
    assert op.py_kernels == before


def test_a_gradient_that_tracing_computes_otherwise_is_left_to_plain_pytorch(
    carrier: Carrier,
) -> None:
    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).max()

    model, x = Largest(), torch.randn(2, 3)
    run, host = compiled(model, carrier)
    found, expected = gradients(model, run, x)[0], gradients(model, model, x)[0]
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert "aten.max.default" in host.reasons[0]


def test_hooks_that_replace_what_is_saved_are_told_so(carrier: Carrier) -> None:
    run, _ = compiled(mlp(), carrier)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone):
        y = run(torch.randn(5, 8))
    with pytest.raises(GraphError, match="outside of the hooks"):
        y.sum().backward()


def test_a_checkpoint_around_the_compiled_model_runs_forward_again(carrier: Carrier) -> None:
    model = mlp()
    run, _ = compiled(model, carrier)
    x = torch.randn(5, 8)
    y = checkpoint(run, x, use_reentrant=False)
    y.square().sum().backward()
    mine = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, mine, gradients(model, model, x)))


def _state_of(y: Tensor) -> object:
    (token,) = y.grad_fn.saved_tensors
    return token._belady
