"""Keeps gradients and optimizer state out of the memory that activations are cut from.

Torch's allocator puts a new block into the smallest hole that holds it. A gradient is born between
two activations and stays, and optimizer state is born where the first iteration left holes and
stays for good; the memory around them is in pieces from then on.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# What torch's allocator cuts from its large blocks.
LARGE_BYTES = 2**20

Place = Callable[[torch.Tensor], torch.Tensor | None]


class Gradients:
    """Moves large gradients as soon as autograd has put them in place.

    Parameters
    ----------
    place
        Copies a gradient to where it shall be; None when there is no room.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._hooks: dict[int, _Hook] = {}
        self._known: list[weakref.ref[torch.Tensor]] = []
        self._sizes: list[int] = []
        self._large: list[int] = []
        self._bytes = 0
        self._hooked = False
        self._active = False
        self._alone = _alone()

    def attach(self, parameters: Iterable[torch.Tensor], most_bytes: int) -> bool:
        """Move the gradients of ``parameters`` from now on, unless they are more than that.

        Costs little while these are the same objects of the same sizes as the time before.

        Returns
        -------
        bool
            Whether they are moved.
        """
        learning = [p for p in parameters if type(p) is torch.nn.Parameter and p.requires_grad]
        sizes = [p.nbytes for p in learning]
        if sizes != self._sizes or any(
            known() is not p for known, p in zip(self._known, learning, strict=True)
        ):
            self._known, self._sizes = [weakref.ref(p) for p in learning], sizes
            self._large = [at for at, p in enumerate(learning) if _followed(p)]
            # By object: one that several modules have is there several times.
            self._bytes = sum({id(learning[at]): sizes[at] for at in self._large}.values())
            self._hooked = False
        self._active = self._bytes <= most_bytes
        if self._active and not self._hooked:
            self._follow(learning[at] for at in self._large)
            self._hooked = True
        return self._active

    def _follow(self, large: Iterable[torch.nn.Parameter]) -> None:
        for parameter in large:
            known = self._hooks.get(id(parameter))
            if known is None or known.parameter() is not parameter:
                self._hooks[id(parameter)] = _Hook(self, parameter)

    def rest(self) -> None:
        """Leave gradients where they are until the next `attach`."""
        self._active = False

    def close(self) -> None:
        """Take all hooks off."""
        hooks, self._hooks = self._hooks, {}
        self._known, self._sizes, self._large, self._bytes = [], [], [], 0
        self._active = self._hooked = False
        for hook in hooks.values():
            hook.handle.remove()

    def placed(self, grad: torch.Tensor, references: tuple[int, int]) -> torch.Tensor | None:
        """A copy of ``grad`` in its place; None when it has to stay."""
        # Whoever else has it (a list of the user's, a collective under way) would go on with the
        # one that was left.
        alone = references == self._alone
        return self._place(grad) if self._active and alone and owns_its_bytes(grad) else None


def settle_state(optimizer: torch.optim.Optimizer, place: Place) -> None:
    """Move the large tensors of an optimizer's state; they stay the same objects."""
    for tensor in tree_leaves(list(optimizer.state.values())):
        if isinstance(tensor, torch.Tensor) and owns_its_bytes(tensor):
            placed = place(tensor) if tensor.nbytes > LARGE_BYTES else None
            if placed is not None:
                tensor.data = placed


class _Hook:
    """Runs when autograd has put or added to the gradient of one parameter."""

    def __init__(self, owner: Gradients, parameter: torch.Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        hook: Any = parameter.register_post_accumulate_grad_hook
        self.handle = hook(self)
        self._owner = weakref.ref(owner)
        self._latest: Callable[[], torch.Tensor | None] = lambda: None

    def __call__(self, parameter: torch.Tensor) -> None:
        owner, grad = self._owner(), parameter.grad
        # A gradient that is added to is in its place already.
        if owner is None or grad is None or grad is self._latest():
            return
        references = _references(grad)
        placed = owner.placed(grad, references)
        if placed is not None:
            parameter.grad = placed
            self._latest = weakref.ref(placed)


def _followed(parameter: torch.Tensor) -> bool:
    strided = parameter.layout is torch.strided
    return parameter.is_leaf and strided and parameter.nbytes > LARGE_BYTES


def owns_its_bytes(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor with bytes of its own (a view into a bucket is not)."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and _tensors_on(tensor.untyped_storage()) == 1
    )


def _tensors_on(storage: torch.UntypedStorage) -> int:
    """How many tensors have these bytes; the object at hand is one more user of them."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """How many refer to the Python object, and to the tensor behind it."""
    return sys.getrefcount(tensor), tensor._use_count()  # type: ignore[attr-defined]


def _alone() -> tuple[int, int]:
    """`_references` of a gradient that only its parameter has: Python and torch have a part."""
    parameter = torch.zeros(1, device="cpu", requires_grad=True)
    parameter.grad = torch.zeros(1, device="cpu")
    grad = parameter.grad
    return _references(grad)
