from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

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
    # Where rounding is coarse, that of float64 counts.
    fine = dtype if dtype is torch.float32 else torch.float64
    assert found.tolerance == TOLERANCES[fine]
    assert all("forward" not in vars(module) for module in model.modules())


class Telling(nn.Module):
    """Tells somebody that it is called."""

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__()
        self.told = told

    def forward(self, x: Tensor) -> Tensor:
        self.told()
        return x * 2


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_cudnn_times_nothing_meanwhile(
    wanted: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", wanted)
    # A list would be put back.
    told = SimpleQueue[bool]()

    def ask() -> None:
        told.put(torch.backends.cudnn.benchmark)
        if fails:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no") if fails else nullcontext():
        trial(nn.Sequential(Telling(ask)), children([0], 3), torch.randn(9, 4).requires_grad_())
    assert not told.empty()
    assert not any(told.get() for _ in range(told.qsize()))
    assert torch.backends.cudnn.benchmark is wanted


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


@pytest.mark.parametrize("module", [Leaning(1.0), Leaning(0.01), Strange()])
def test_what_differs_is_refused(module: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), module)
    with pytest.raises(SectionError, match="when it was tried on 5 samples"):
        trial(model, children(range(2), 3), torch.randn(9, 4))


class Keeping(nn.Module):
    """Keeps something of a call where others find it: a loss, an activation, a mask."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.kept: list[Tensor] = []
        self.known = {"x": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "attribute":
            self.loss = x.square().mean()
        elif self.where == "list":
            self.kept.append(x)
        else:
            self.known["x"] = x
        return x * 2


@pytest.mark.parametrize(
    "module", [Counting(), Keeping("attribute"), Keeping("list"), Keeping("dict")]
)
def test_what_keeps_something_of_a_call_is_refused(module: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), module)
    python = random.getstate()
    with pytest.raises(SectionError, match="that of the last slice"):
        trial(model, children(range(2), 3), torch.randn(9, 4))
    assert getattr(module, "calls", 0) == 0
    assert not hasattr(module, "loss")
    assert not getattr(module, "kept", [])
    assert random.getstate() == python


class _Swaps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 0.5 * gradient + 0.5 * gradient.flip(0)


class Swapping(nn.Module):
    """Mixes samples in backward alone."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Swaps.apply(x)  # type: ignore[no-untyped-call]
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_gradient_is_seen_beside_much_larger_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # The weight of the last layer has gradients millions of times those of the first.
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(first, Swapping(), last).to(dtype)
    with torch.no_grad():
        last.weight.mul_(1e-4)
        first.weight.mul_(1e3)
    x = torch.randn(9, 8, dtype=dtype)
    with pytest.raises(SectionError, match="in float64"):
        trial(model, children(range(3), 3), x)
    assert trial(nn.Sequential(first, last), children(range(2), 3), x).passes


class Squeezing(nn.Module):
    """Takes a batch of one sample for no batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1).squeeze()


def test_slices_of_one_sample_are_tried() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Squeezing())
    with pytest.raises((SectionError, RuntimeError)):
        trial(model, children(range(2), 3), torch.randn(9, 4))


def test_a_set_that_nobody_changes_is_no_reason() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for module in model:
        module.names = set("abcdefghijklmnop")  # type: ignore[assignment]
        module.names.discard("c")  # type: ignore[operator]
    assert trial(model, children(range(2), 3), torch.randn(9, 4)).passes


def test_a_gradient_that_rounding_alone_makes_does_not_count() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    assert trial(model, children(range(3), 4), torch.randn(8, 3, 16, 16)).passes


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
