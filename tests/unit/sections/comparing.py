"""A model in sections beside its twin that runs as plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from belady.ir.plan import Section
from belady.sections.wrap import wrap

# Relative to the largest number among all gradients (outputs, buffers): sums in another order. Of
# bfloat16, a slice's sum is rounded before it is added, and behind a BatchNorm the sums cancel.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-5, torch.float16: 0.02, torch.bfloat16: 0.1}


def children(numbers: Iterable[int], slices: int) -> Section:
    return Section(tuple(str(number) for number in numbers), slices)


def run(model: nn.Module, x: Tensor, backward: Callable[[Tensor], Any] | None = None) -> list[Any]:
    """Outputs, gradients and buffers after one forward and backward."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    model.zero_grad()
    y = model(x)
    # Behind a BatchNorm, the gradients of a sum of squares are rounding alone.
    weights = torch.arange(y.numel(), dtype=torch.float64).mul_(0.7).sin_().add_(0.1).to(y.device)
    loss = (y.double() * weights.view(y.shape)).mean()
    loss.backward() if backward is None else backward(loss)
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [y.detach(), gradients, list(model.buffers())]


def twins(
    model: nn.Module, *sections: Section, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, nn.Module, Callable[[], None]]:
    # `to` converts in place.
    model = copy.deepcopy(model).to(dtype)
    twin = copy.deepcopy(model)
    return model, twin, wrap(twin, sections)


def assert_alike(expected: list[Any], actual: list[Any], dtype: torch.dtype) -> None:
    for group, other in zip(expected, actual, strict=True):
        a, b = ([group], [other]) if isinstance(group, Tensor) else (group, other)
        scale = max(
            (t.double().abs().max().item() for t in a if t is not None and t.numel()), default=0
        )
        for one, two in zip(a, b, strict=True):
            assert (one is None) == (two is None)
            if one is not None:
                assert (one.dtype, one.shape, one.stride()) == (two.dtype, two.shape, two.stride())
                assert (one.double() - two.double()).abs().max() <= TOLERANCES[dtype] * scale


def assert_same_in_sections(
    model: nn.Module,
    x: Tensor,
    *sections: Section,
    dtype: torch.dtype = torch.float64,
    backward: Callable[[Tensor], Any] | None = None,
) -> None:
    """Compare two iterations; the second meets the running statistics of the first."""
    plain, twin, undo = twins(model, *sections, dtype=dtype)
    x = x.detach().to(dtype).requires_grad_(x.requires_grad)
    for _ in range(2):
        assert_alike(run(plain, x, backward), run(twin, x, backward), dtype)
    undo()
