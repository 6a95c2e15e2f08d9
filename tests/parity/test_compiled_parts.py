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
