"""What stands in the place of a function of `torch.nn.functional`, until it is detached."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from belady.errors import SectionError

Function = Callable[..., Tensor]

# Not those of AOTAutograd, which a compiler that plans memory itself has asked for.
_TENSORS = (Tensor, torch.nn.Parameter, FakeTensor)


class Standing(ABC):
    """Takes the calls of a function of `torch.nn.functional`, once it is attached.

    Parameters
    ----------
    name
        Of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._function: Function | None = None
        self._below: Function = getattr(F, name)

    @abstractmethod
    def call(self, plain: Function, *args: Any, **kwargs: Any) -> Tensor:
        """Do a call; ``plain`` is what was in the place before."""

    @property
    def is_attached(self) -> bool:
        """Whether it has taken the place."""
        return self._function is not None

    def attach(self) -> None:
        """Take the place, once."""
        if self.is_attached:
            return
        plain = self._below = _in_use(getattr(F, self._name))
        # Whoever forgets to close what owns this leaves a function that only passes calls on.
        owner = weakref.ref(self)

        @functools.wraps(plain)
        def standing(*args: Any, **kwargs: Any) -> Tensor:
            own = None if torch.compiler.is_compiling() else owner()
            if own is None or not own.stands(standing):
                return plain(*args, **kwargs)
            return own.call(plain, *args, **kwargs)

        _STANDING[standing] = owner, plain
        self._function = standing
        setattr(F, self._name, standing)

    def detach(self) -> None:
        """Give the place back; where another stands on it, only pass calls on from now on."""
        function, self._function = self._function, None
        if function is not None and getattr(F, self._name) is function:
            setattr(F, self._name, _in_use(self._below))

    def stands(self, function: Function) -> bool:
        """Whether ``function`` is what stands in the place for this one."""
        return self._function is function


# Whose each function that ever stood in the place is, and what was there before it.
_STANDING: weakref.WeakKeyDictionary[Function, tuple[weakref.ref[Standing], Function]] = (
    weakref.WeakKeyDictionary()
)


def _in_use(function: Function) -> Function:
    """``function``, or what it passes calls on to if it is nobody's any more."""
    while function in _STANDING:
        owner, below = _STANDING[function]
        standing = owner()
        if standing is not None and standing.stands(function):
            break
        function = below
    return function


def is_ordinary(*tensors: object) -> bool:
    """Whether a call with these runs its ops by itself: no transform, no graph written down."""
    return (
        all(type(tensor) in _TENSORS for tensor in tensors)
        and not torch._C._are_functorch_transforms_active()
        and not _is_traced()
        and forward_ad._current_level < 0
    )


def is_faked(tensor: Tensor) -> bool:
    """Whether it has no bytes, as what is traced before it runs."""
    return isinstance(tensor, FakeTensor)


def _is_traced() -> bool:
    """Whether ops are written down for a graph, which is to have the plain one in it."""
    proxies = torch._C._TorchDispatchModeKey.PROXY
    tracing = torch._C._get_tracing_state() is not None
    return tracing or torch._C._get_dispatch_mode(proxies) is not None


def saved(ctx: Any, what: str, copy: str) -> tuple[Any, ...]:
    """The saved tensors of a node.

    Parameters
    ----------
    what, copy
        What they are, and how to copy one, for the message.

    Raises
    ------
    SectionError
        If one was changed in place, which plain PyTorch may allow.
    """
    try:
        tensors: tuple[Any, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise SectionError(
            f"{what}, whose backward needs them where memory is scarce: change a copy, as in "
            f"{copy}.clone() ({error})"
        ) from None
    return tensors
