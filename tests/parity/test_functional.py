"""Models that are also called inside functorch's transforms, where belady manages nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import belady
from belady.virtual import VirtualMemory

ROOM = 1 << 30


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return list(grad(lambda p: functional_call(model, p, (x,)).sum())(weights).values())


def gradients_of_samples(model: nn.Module, x: Tensor) -> list[Tensor]:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    of_one = grad(lambda p, row: functional_call(model, p, (row,)).sum())
    return list(vmap(of_one, (None, 0))(weights, x).values())


def directions(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [it.detach() for it in jvp(model, (x,), (x,))]


def trained(model: nn.Module, also: Callable[[nn.Module, Tensor], list[Tensor]]) -> list[Tensor]:
    found = []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for index in range(6):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(index))
        found += also(model, x)
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *also(model, x)]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("also", [gradients, gradients_of_samples, directions])
def test_calls_inside_transforms_run_as_before(
    also: Callable[[nn.Module, Tensor], list[Tensor]],
) -> None:
    expected, model = trained(network(), also), network()
    with belady.virtualize(model, ROOM, policy="floor") as vm:
        assert all(map(torch.equal, trained(model, also), expected))
        assert planned(vm)


def planned(vm: VirtualMemory) -> bool:
    run = vm.run()
    return run is not None and not run.plan.moves_nothing


def adapted(model: nn.Module) -> list[Tensor]:
    """Parameters after steps through a step (MAML), whose results stand in their place."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for index in range(6):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(index))
        weights = dict(model.named_parameters())
        loss = functional_call(model, weights, (x,)).square().mean()
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        fast = {name: p - 0.1 * it for (name, p), it in zip(weights.items(), slopes, strict=True)}
        functional_call(model, fast, (x,)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [it.detach() for it in model.parameters()]


def test_results_in_the_place_of_parameters_are_not_asked_for_gradients() -> None:
    expected, model = adapted(network()), network()
    # Torch warns of whoever asks, and a warning fails a test.
    with belady.virtualize(model, ROOM) as vm:
        assert all(map(torch.equal, adapted(model), expected))
        assert vm.run() is not None
