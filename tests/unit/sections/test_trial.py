from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from belady.errors import SectionError
from belady.ir.plan import Section
from belady.sections.trial import TOLERANCES, Trial, trial
from benchmarks.workloads.residual import ResNet
from tests.unit.sections.comparing import children


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.MaxPool2d(2)
    )


def state(model: nn.Module) -> list[object]:
    return [
        *(tensor.clone() for tensor in model.state_dict().values()),
        *(None if p.grad is None else p.grad.clone() for p in model.parameters()),
        *(p._version for p in model.parameters()),
        *(b._version for b in model.buffers() if b.is_floating_point()),
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_rounding_passes_and_nothing_is_touched(needs_gradient: bool, dtype: torch.dtype) -> None:
    model = network().to(dtype)
    x = torch.randn(9, 3, 8, 8, dtype=dtype).requires_grad_(needs_gradient)
    model(x).float().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    before, mine = state(model), x.grad
    found = trial(model, children(range(5), 3), x)
    assert all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(before, state(model), strict=True)
    )
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert x.grad is mine
    assert max(found.outputs, found.gradients, found.buffers) <= found.tolerance
    assert found.tolerance == TOLERANCES[dtype]
    assert all("forward" not in vars(module) for module in model.modules())


class Counting(nn.Module):
    """Multiplies by how often it has been called, by Python's and NumPy's chance."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        random.random()
        np.random.rand()  # noqa: NPY002
        return x * self.calls


class Leaning(nn.Module):
    """Adds what only numbers show: something of the other samples."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * x.mean(0, keepdim=True)


class Strange(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan")


@pytest.mark.parametrize("module", [Counting(), Leaning(1.0), Leaning(0.01), Strange()])
def test_what_differs_is_refused(module: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), module)
    python = random.getstate()
    with pytest.raises(SectionError, match="when it was tried on 6 samples"):
        trial(model, children(range(2), 3), torch.randn(9, 4))
    assert getattr(module, "calls", 0) == 0
    assert random.getstate() == python


def test_what_many_norms_make_of_rounding_is_tried_in_float64() -> None:
    torch.manual_seed(0)
    model, x = ResNet((3, 4, 6, 3), 4), torch.randn(4, 3, 32, 32)
    before = [(it, it.clone()) for it in model.state_dict(keep_vars=True).values()]
    found = trial(model, Section(("",), 2), x)
    assert found.tolerance == TOLERANCES[torch.float64]
    assert max(found.outputs, found.gradients, found.buffers) <= found.tolerance
    for tensor, value in before:
        assert tensor.dtype is value.dtype
        assert torch.equal(tensor, value)
    after = model.state_dict(keep_vars=True).values()
    assert all(a is b for a, (b, _) in zip(after, before, strict=True))
    broken = nn.Sequential(model, Leaning(0.01))
    with pytest.raises(SectionError, match="in float64"):
        trial(broken, children(range(2), 2), x)


def test_a_refusal_to_run_is_passed_on() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    with pytest.raises(SectionError, match="writes the input"):
        trial(model, children(range(2), 2), torch.randn(9, 4))
    with pytest.raises(SectionError, match="1 samples cannot be tried in 2 slices"):
        trial(model, children([1], 2), torch.randn(1, 4))


def test_parts_of_a_model_are_tried_alone() -> None:
    model = network()
    found = trial(model, Section(("3", "4"), 2), torch.randn(2, 4, 6, 6))
    assert isinstance(found, Trial)
    assert found.buffers == 0.0
