from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.profiler import ProfilerActivity, profile

from belady.errors import OrderError
from belady.ordered.wrap import ordered
from tests.support.training import footprint


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(144, 5),
    )


def images(samples: int = 4) -> Tensor:
    return torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_everything_is_as_it_was_and_again_afterwards() -> None:
    model = block()
    before = footprint(model.modules()), list(model.state_dict()), list(model.named_modules())
    undo = ordered(model)
    after = footprint(model.modules()), list(model.state_dict()), list(model.named_modules())
    assert after == before
    assert "forward" in vars(model[0])
    undo()
    undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_came_later_stays() -> None:
    model = block()
    undo = ordered(model)
    model[0].forward = torch.tanh
    undo()
    assert model[0].forward is torch.tanh


def test_relus_are_as_they_were_afterwards() -> None:
    relu = nn.ReLU()
    undo = ordered(relu)
    x = images().requires_grad_()
    assert type(relu(x).grad_fn) is not type(x.relu().grad_fn)
    undo()
    assert type(relu(x).grad_fn) is type(x.relu().grad_fn)


def test_hooks_on_a_relu_see_what_they_saw() -> None:
    def seen(watched: bool) -> list[Tensor]:
        relu = nn.ReLU()
        if watched:
            ordered(relu)
        found: list[Tensor] = []
        relu.register_forward_hook(lambda _, given, result: found.extend([*given, result]))
        relu.register_full_backward_hook(lambda _, inner, outer: found.extend([*inner, *outer]))
        relu(images().requires_grad_() * 2).sum().backward()
        return found

    expected, found = seen(False), seen(True)
    assert len(expected) == len(found) == 4
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


def test_copies_and_pickles_run_plainly() -> None:
    model = block()
    ordered(model)
    x = images().requires_grad_() * 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other[4].forward.__self__ is other[4]
        torch.autograd.grad(other(x).sum(), other[4].weight, create_graph=True)


def test_what_has_another_forward_keeps_it() -> None:
    model = block()
    model[0].forward = torch.tanh
    ordered(model)()
    assert model[0].forward is torch.tanh


def test_the_model_dies_with_its_last_reference() -> None:
    model = block()
    ordered(model)
    alive = weakref.ref(model[0].weight)
    model(images()).sum().backward()
    del model
    gc.collect()
    assert alive() is None


def test_the_same_graph_backward_twice() -> None:
    model = block()
    ordered(model)
    loss = model(images()).square().sum()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    for parameter, first in zip(model.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 2 * first)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_gradients_of_some_only() -> None:
    model = block()
    x = images().requires_grad_()
    expected = torch.autograd.grad(model(x * 1).sum(), x)
    ordered(model)
    assert torch.equal(torch.autograd.grad(model(x * 1).sum(), x)[0], expected[0])
    (weight,) = torch.autograd.grad(model(x * 1).sum(), model[2].weight)
    assert weight.shape == model[2].weight.shape


def test_gradient_of_a_gradient_is_refused() -> None:
    model = block()
    undo = ordered(model)
    with pytest.raises(OrderError, match="create_graph=True"):
        torch.autograd.grad(model(images()).sum(), model[0].weight, create_graph=True)
    undo()
    torch.autograd.grad(model(images()).sum(), model[0].weight, create_graph=True)


@pytest.mark.parametrize("written", ["input", "weight"])
def test_a_value_changed_before_backward_is_noticed(written: str) -> None:
    layer = nn.Conv2d(3, 4, 3)
    ordered(layer)
    x = images().requires_grad_() * 1
    loss = layer(x).sum()
    with torch.no_grad():
        (x if written == "input" else layer.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_graphs_outlive_the_order() -> None:
    model = block()
    undo = ordered(model)
    loss = model(images()).sum()
    undo()
    loss.backward()
    ordered_gradient, model[2].weight.grad = model[2].weight.grad, None
    model(images()).sum().backward()
    assert torch.equal(ordered_gradient, model[2].weight.grad)


def test_functional_transforms_run_plainly() -> None:
    model = block()
    x = images()
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, parameters, (one[None],)).square().sum()

    expected = vmap(grad(loss), (None, 0))(parameters, x)
    ordered(model)
    found = vmap(grad(loss), (None, 0))(parameters, x)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_forward_mode_runs_plainly() -> None:
    model = block()
    ordered(model)
    with forward_ad.dual_level():
        result = model(forward_ad.make_dual(images(), torch.ones(4, 3, 8, 8)))
        assert forward_ad.unpack_dual(result).tangent is not None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_runs_plainly(backend: str) -> None:
    model = block()
    expected = torch.autograd.grad(model(images()).sum(), model[2].weight)
    ordered(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found = torch.autograd.grad(compiled(images()).sum(), model[2].weight)
    torch._dynamo.reset()
    assert torch.equal(expected[0], found[0])


def test_runs_on_tensors_without_bytes() -> None:
    model = block()
    ordered(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        x = fake.from_tensor(images()).requires_grad_()
        model(x * 1).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def peak_bytes(layer: nn.Module, small: Tensor, held: bool) -> int:
    """Most bytes that torch had allocated at once in forward and backward of an upsampled input."""
    kept = []

    def widened() -> Tensor:
        x = nn.functional.interpolate(small.detach().requires_grad_(), scale_factor=8)
        kept.extend([x] if held else [])
        return x

    def iteration() -> None:
        layer(widened()).sum().backward()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        iteration()
    events = profiler.profiler.kineto_results.events()
    live = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            top = max(top, live)
    return top


# In this layout oneDNN needs no copies of its own.
LAST = torch.channels_last
PICTURES = torch.randn(2, 16, 8, 8).to(memory_format=LAST)
WIDE = {
    "convolution": (nn.Conv2d(16, 16, 3).to(memory_format=LAST), PICTURES),
    "linear": (nn.Linear(2048, 1), torch.randn(1, 64, 256)),
}
SIGNED = {
    "convolution": (nn.Sequential(nn.ReLU(True), WIDE["convolution"][0]), PICTURES),
    "pool": (nn.Sequential(nn.ReLU(True), nn.MaxPool2d(8)), PICTURES.contiguous()),
}


def saved_bytes(layer: nn.Module, small: Tensor) -> tuple[int, int]:
    """By how much the order lowers the peak, and by how much where the input is held."""
    for _ in range(2):  # gradients and libraries are there afterwards
        plain = peak_bytes(layer, small, held=False)
    undo = ordered(layer)
    saved = plain - peak_bytes(layer, small, held=False)
    still_held = plain - peak_bytes(layer, small, held=True)
    undo()
    return saved, still_held


@pytest.mark.parametrize("name", WIDE)
def test_the_gradient_takes_the_place_of_the_input(name: str) -> None:
    layer, small = WIDE[name]
    saved, still_held = saved_bytes(layer, small)
    wide = small.nbytes * 8 ** (small.dim() - 2)
    assert 0.8 * wide < saved <= wide
    assert still_held < 0.1 * wide


@pytest.mark.parametrize("name", SIGNED)
def test_the_gradient_takes_the_place_of_what_a_relu_gave(name: str) -> None:
    saved, _ = saved_bytes(*SIGNED[name])
    wide = 64 * PICTURES.nbytes
    # All but a byte an element.
    assert 0.6 * wide < saved <= 0.75 * wide
