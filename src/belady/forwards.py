"""The place of a module's forward: taken without being seen, and given back."""

from __future__ import annotations

import functools
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_TOKENS = map(str, itertools.count())


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of the module's class, whatever stands in its place."""
    bound: Callable[..., Any] = type(module).forward.__get__(module)
    return bound


def run_plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of the module's class.

    In frames that Dynamo captures in part: a bound method is made again there by its name, which
    gives what stands in its place.
    """
    return type(module).forward(module, *args, **kwargs)


def is_scripted(module: nn.Module) -> bool:
    """Whether TorchScript has compiled the module: it has no forward in Python, and no hooks."""
    return isinstance(module, torch.jit.ScriptModule)


def demand_python(module: object) -> None:
    """Refuse what has no place for a forward.

    Raises
    ------
    TypeError
        If it is no module.
    ValueError
        If it is TorchScript's.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"models must be torch.nn.Module, not {type(module).__name__}")
    if is_scripted(module):
        raise ValueError(
            f"{module.original_name} is compiled by TorchScript, whose modules take no hooks and "
            "have no forward in Python: hand over the module that torch.jit was given, or one of "
            "Python that calls this one"
        )


def is_patched(module: nn.Module) -> bool:
    """Whether something else than the forward of its class stands in its place.

    A copy of a module on which a `Forward` stands has that of its class as an attribute.
    """
    if is_scripted(module):
        return True
    found = vars(module).get("forward")
    return not (found is None or isinstance(found, Late) or found == plain_forward(module))


class Forward(ABC):
    """Stands on a module in the place of its forward; a subclass says what it does instead.

    An attribute of the instance, where `state_dict`, names and hooks do not see it. It pickles and
    copies as the forward of the class, bound to the copy.

    Attributes
    ----------
    token
        What `called` finds it by. Dynamo of torch 2.11 gives no object to a function that it calls
        while it captures, and takes a number that changes for one of any size.
    """

    def __init__(self, owner: nn.Module) -> None:
        functools.update_wrapper(self, plain_forward(owner), updated=())
        self.token = next(_TOKENS)
        _CALLED[self.token] = self
        # Not a strong one: the owner holds this.
        self._owner = weakref.ref(owner)
        self._below: object = None

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""

    def attach(self) -> None:
        """Take the place."""
        place = vars(self.alive())
        self._below = place.get("forward")
        place["forward"] = self

    def detach(self) -> None:
        """Give the place back, if it is still this one's."""
        owner = self._owner()
        if owner is not None and vars(owner).get("forward") is self:
            del vars(owner)["forward"]
            if isinstance(self._below, Late) and self._below.stands:
                vars(owner)["forward"] = self._below

    def alive(self) -> nn.Module:
        """The module on which this stands."""
        owner = self._owner()
        assert owner is not None
        return owner

    def __reduce__(self) -> Any:
        return getattr, (self.alive(), "forward")


_CALLED: weakref.WeakValueDictionary[str, Forward] = weakref.WeakValueDictionary()


def called(token: str) -> Forward:
    """What has the token, and is alive."""
    return _CALLED[token]


class Late(Forward):
    """Does what stands in its place by the time it is called.

    A module looks its forward up before its hooks run, and a hook of ours may put another there.
    """

    stands = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        owner = self.alive()
        found = vars(owner).get("forward", self)
        run = plain_forward(owner) if found is self else found
        return run(*args, **kwargs)

    def detach(self) -> None:
        """Give the place back, also where another stands on it that gives it back later."""
        self.stands = False
        super().detach()
