"""Models of which the user has compiled a part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import belady

ROOM = 1 << 30
WIDTH = 16


def losses(policy: str | None, *, hooked: bool) -> Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    if hooked:
        part[0].register_forward_hook(lambda *_: None)
    compiled = torch.compile(part, backend="aot_eager", fullgraph=True)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), compiled, nn.Linear(WIDTH, WIDTH))
    vm = None if policy is None else belady.virtualize(model, ROOM, policy=policy)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(8, WIDTH)).square().sum()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    if vm is not None:
        assert vm.run() is not None
        vm.close()
    return torch.stack(found)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("policy", ["floor", "auto"])
def test_a_part_compiled_as_one_graph_trains_as_without(policy: str, hooked: bool) -> None:
    assert torch.equal(losses(policy, hooked=hooked), losses(None, hooked=hooked))


def stepped(policy: str | None, engine: str = "eager") -> Tensor:
    """Losses of training with an optimizer's step that is compiled: in 2.11 another by its bits."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
    optimizer, found = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), []
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    vm = None if policy is None else belady.virtualize(model, ROOM, policy=policy, engine=engine)
    for _ in range(8):
        loss = model(torch.randn(256, 64)).square().sum()
        loss.backward()
        step()
        optimizer.zero_grad()
        found.append(loss.detach())
    if vm is not None:
        run = vm.run()
        assert run is not None
        assert run.plan.moves_nothing is (policy == "auto")
        assert run.measured is not None
        vm.close()
    torch._dynamo.reset()
    return torch.stack(found)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("policy", ["floor", "auto"])
def test_a_step_that_is_compiled_ends_an_iteration_and_breaks_nothing(policy: str) -> None:
    """A mode that ended inside would be back, without its stack, when the compiled call ends."""
    assert torch.equal(stepped(policy), stepped(None))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_step_that_is_compiled_beside_a_captured_graph() -> None:
    assert torch.equal(stepped("floor", "graph"), stepped(None))
