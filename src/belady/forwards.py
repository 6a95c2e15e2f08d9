"""The place of a module's forward: taken without being seen, and given back."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of the module's class, whatever stands in its place."""
    bound: Callable[..., Any] = type(module).forward.__get__(module)
    return bound


def is_patched(module: nn.Module) -> bool:
    """Whether something else than the forward of its class stands in its place.

    A copy of a module on which a `Forward` stands has that of its class as an attribute.
    """
    found = vars(module).get("forward")
    return found is not None and found != plain_forward(module)


class Forward(ABC):
    """Stands on a module in the place of its forward; a subclass says what it does instead.

    An attribute of the instance, where `state_dict`, names and hooks do not see it. It pickles and
    copies as the forward of the class, bound to the copy.
    """

    def __init__(self, owner: nn.Module) -> None:
        functools.update_wrapper(self, plain_forward(owner), updated=())
        # Not a strong one: the owner holds this.
        self._owner = weakref.ref(owner)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""

    def attach(self) -> None:
        """Take the place."""
        vars(self.alive())["forward"] = self

    def detach(self) -> None:
        """Give the place back, if it is still this one's."""
        owner = self._owner()
        if owner is not None and vars(owner).get("forward") is self:
            del vars(owner)["forward"]

    def alive(self) -> nn.Module:
        """The module on which this stands."""
        owner = self._owner()
        assert owner is not None
        return owner

    def __reduce__(self) -> Any:
        return getattr, (self.alive(), "forward")
