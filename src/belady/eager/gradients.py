"""Keeps large gradients in memory of their own, so that they do not cut up what activations need.

A gradient is born between two activations and stays to the end of the iteration. The allocator
puts it into the smallest hole that holds it, and that hole is in pieces for the rest of backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

# What torch's allocator cuts from its large blocks.
_LARGE = 2**20
# Gradients that need more than this part of the budget stay: memory set apart is idle in forward.
_SHARE = 1 / 8

Place = Callable[[torch.Tensor], torch.Tensor | None]


class Gradients:
    """Moves large gradients as soon as autograd has put them in place.

    Parameters
    ----------
    place
        Copies a gradient to where it shall be; None when there is no room.
    budget_bytes
        Device budget.
    """

    def __init__(self, place: Place, budget_bytes: int) -> None:
        self._place = place
        self._most = int(budget_bytes * _SHARE)
        self._hooks: dict[int, _Hook] = {}
        self._active = False

    def attach(self, modules: Iterable[torch.nn.Module]) -> None:
        """Move the gradients of ``modules`` from now on, unless they are too large together."""
        large = {id(p): p for module in modules for p in module.parameters() if _followed(p)}
        self._active = sum(p.nbytes for p in large.values()) <= self._most
        if not self._active:
            return
        for key, parameter in large.items():
            known = self._hooks.get(key)
            if known is None or known.parameter() is not parameter:
                self._hooks[key] = _Hook(self, parameter)

    def rest(self) -> None:
        """Leave gradients where they are until the next `attach`."""
        self._active = False

    def close(self) -> None:
        """Take all hooks off."""
        hooks, self._hooks = self._hooks, {}
        for hook in hooks.values():
            hook.handle.remove()

    def placed(self, grad: torch.Tensor) -> torch.Tensor | None:
        """A copy of ``grad`` in its place; None when it has to stay."""
        return self._place(grad) if self._active and _movable(grad) else None


class _Hook:
    """Runs when autograd has put or added to the gradient of one parameter."""

    def __init__(self, owner: Gradients, parameter: torch.Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.handle: Any = parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]
        self._owner = weakref.ref(owner)
        self._latest: Callable[[], torch.Tensor | None] = lambda: None

    def __call__(self, parameter: torch.Tensor) -> None:
        owner, grad = self._owner(), parameter.grad
        # A gradient that is added to is in its place already.
        if owner is None or grad is None or grad is self._latest():
            return
        placed = owner.placed(grad)
        if placed is not None:
            parameter.grad = placed
            self._latest = weakref.ref(placed)


def _followed(parameter: torch.Tensor) -> bool:
    return (
        type(parameter) is torch.nn.Parameter
        and parameter.requires_grad
        and parameter.layout is torch.strided
        and parameter.nbytes > _LARGE
    )


def _movable(grad: torch.Tensor) -> bool:
    """Whether ``grad`` is a plain tensor with bytes of its own (a view into a bucket is not)."""
    return (
        type(grad) is torch.Tensor
        and not grad.requires_grad
        and grad.layout is torch.strided
        and grad.untyped_storage().nbytes() == grad.nbytes
    )
