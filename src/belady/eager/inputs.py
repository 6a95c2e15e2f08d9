"""What modules are called with, and more of the like for trials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn


class Input(NamedTuple):
    """What a tensor is like; the tensor would live on, which the trace would show."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    def sample(self, count: int, device: torch.device) -> torch.Tensor:
        """A few samples, of numbers that no generator is asked for."""
        shape = (min(self.shape[0], count), *self.shape[1:])
        ramp = torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device=device)
        numbers = ramp.mul_(0.7).sin_().view(shape).to(self.dtype)
        return numbers.requires_grad_(self.requires_grad)


@contextmanager
def noting_inputs(model: nn.Module, into: dict[nn.Module, Input]) -> Iterator[None]:
    """Take down what each module is called with first, if that is one tensor."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if len(args) == 1 and not kwargs else None
        if module not in into and isinstance(given, torch.Tensor) and given.dim():
            into[module] = Input(given.shape, given.dtype, given.requires_grad)

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
