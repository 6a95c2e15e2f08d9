"""Numbers for ReLUs in the coordinated order, and how they are compared."""

from __future__ import annotations

import torch
from torch import Tensor

from belady.ordered.relu import source_of
from tests.support.training import raw

SPECIAL = torch.tensor(
    [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.5, -1.5, 1e-45, -1e-45]
)


def special(shape: tuple[int, ...], step: int) -> Tensor:
    """Every pair of special numbers stands together somewhere, if steps are 1 and 10."""
    count = torch.Size(shape).numel()
    return SPECIAL.repeat_interleave(step).repeat(count // (10 * step) + 1)[:count].view(shape)


def is_one(y: Tensor) -> bool:
    """Whether ``y`` is what a ReLU in the order has made."""
    return source_of(y) is not None


def assert_equal_bits(one: Tensor, two: Tensor) -> None:
    assert (one.dtype, one.shape, one.stride()) == (two.dtype, two.shape, two.stride())
    assert torch.equal(raw(one), raw(two))


def leaf() -> Tensor:
    return torch.randn(4, 6).requires_grad_()
