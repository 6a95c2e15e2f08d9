"""TorchScript's modules: refused as models, and as parts of one they change no bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.forwards import is_patched
from belady.sections.stages import is_sequential
from tests.support.training import at_tight_budget, raw

pytestmark = [
    pytest.mark.usefixtures("captures"),
    pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated"),
    # Of the size of a batch, which a batch norm looks at.
    pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean"),
    # Dynamo's own, of what goes on behind a module that it has no way into.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
ENGINES = ["eager", "graph", "auto"]


def made(how: str) -> nn.Module:
    plain = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
    if how == "script":
        scripted: nn.Module = torch.jit.script(plain)
        return scripted
    traced: nn.Module = torch.jit.trace(plain, torch.randn(32, 64))
    return traced


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 64), made(how), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).tanh())


def seeded(how: str) -> Net:
    torch.manual_seed(0)
    return Net(how)


def trained(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(6):
        loss = model(torch.randn(32, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(it.clone() for it in model.state_dict().values())]


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_part_that_is_torchscripts_changes_no_bit(engine: str, how: str) -> None:
    def within(budget: int) -> list[Tensor]:
        model = seeded(how)
        with belady.virtualize(model, budget, engine=engine) as vm:
            found = trained(model)
            assert vm.run() is not None
        return found

    pairs = zip(trained(seeded(how)), at_tight_budget(within), strict=True)
    assert all(torch.equal(raw(a), raw(b)) for a, b in pairs)


@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_part_that_is_torchscripts_is_not_taken_apart(how: str) -> None:
    part = made(how)
    assert is_patched(part)
    assert not is_sequential(part)


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_is_torchscripts_is_refused(engine: str, how: str) -> None:
    with pytest.raises(ValueError, match="Sequential is compiled by TorchScript") as raised:
        belady.virtualize(made(how), 1 << 30, engine=engine)
    assert "hand over the module that torch.jit was given" in str(raised.value)
