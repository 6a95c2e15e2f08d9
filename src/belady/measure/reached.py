"""What the code of modules reaches outside of them: globals, closures, and what these hold.

A cache of tensors, a counter, a generator of random numbers or an iterator is found by the names
that forwards and hooks read, and by those of the functions that they name. What libraries hold is
left alone.
"""

from __future__ import annotations

import dis
import functools
import itertools
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

Undo = Callable[[], None]

_LIBRARIES = sys.stdlib_module_names | {"torch", "torchvision", "numpy", "triton", "belady"}
_READ = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_CACHED: Any = type(functools.lru_cache(len))
_STARTED: tuple[Iterator[Any], ...] = (iter([]), iter(()), iter(""), iter(b""), iter(range(0)))
# What can be forked where it stands. A generator cannot.
_ITERATORS = (
    *(it for it in vars(itertools).values() if isinstance(it, type) and hasattr(it, "__next__")),
    *map(type, _STARTED),
    type(iter(dict[str, int]())),
    type(iter(set[int]())),
)
_HOLDERS = (dict, list, set, deque)
# Of more functions one is a library's whose name is not known here.
_MOST = 1_000
_MISSING = object()


@dataclass(frozen=True)
class _Place:
    """Where a name stands for something: in a dict, in a class, or in what functions share."""

    space: Any
    name: str = ""

    def get(self) -> Any:
        if isinstance(self.space, CellType):
            # One is empty until what it stands for is made.
            with suppress(ValueError):
                return self.space.cell_contents
            return _MISSING
        space = self.space if isinstance(self.space, dict) else vars(self.space)
        return space.get(self.name, _MISSING)

    def put(self, value: Any) -> None:
        """Have the name stand for a value, or for nothing, if it does not."""
        if self.get() is value:
            return
        if isinstance(self.space, CellType):
            self.space.cell_contents = value
        elif isinstance(self.space, dict):
            self.space.pop(self.name, None)
            if value is not _MISSING:
                self.space[self.name] = value
        elif value is _MISSING:
            delattr(self.space, self.name)
        else:
            setattr(self.space, self.name, value)


@dataclass
class Reached:
    """What was found; iterators and caches of functions have stand-ins until all is undone.

    Attributes
    ----------
    undo
        Has names stand for what they did, and puts generators of random numbers back.
    holders
        Dicts, lists and the like whose items may change.
    """

    undo: list[Undo] = field(default_factory=list)
    holders: list[Any] = field(default_factory=list)
    _functions: list[FunctionType] = field(default_factory=list)
    _seen: set[object] = field(default_factory=set)
    _instead: list[tuple[_Place, Any]] = field(default_factory=list)

    @classmethod
    def by(cls, module: torch.nn.Module) -> Reached:
        """By the methods and hooks of a module and of those inside it."""
        found, followed = cls(), 0
        for part in module.modules():
            hooks = *part._forward_pre_hooks.values(), *part._forward_hooks.values()
            # Containers of its own are known.
            held = (it for it in vars(part).values() if not isinstance(it, _HOLDERS))
            for it in (*hooks, *held):
                found._look_at(it)
            found._look_in(type(part))
        while found._functions and followed < _MOST:
            found._follow(found._functions.pop())
            followed += 1
        # Once nothing can fail any more, as it would leave them there.
        for place, instead in found._instead:
            place.put(instead)
        return found

    def _follow(self, function: FunctionType) -> None:
        read, named = names_in(function.__code__)
        space = function.__globals__
        for name in read:
            value = self._bound(_Place(space, name))
            if issubclass(type(value), ModuleType) and not _is_library(value.__name__):
                for inner in named & vars(value).keys():
                    self._bound(_Place(vars(value), inner))
        for cell in function.__closure__ or ():
            self._bound(_Place(cell))

    def _bound(self, place: _Place) -> Any:
        """Note what a name stands for, and give it."""
        value = place.get()
        if (known := (id(place.space), place.name)) in self._seen:
            return value
        self._seen.add(known)
        self.undo.append(functools.partial(place.put, value))
        # One that stands for another may answer with an error of its own.
        with suppress(Exception):
            if (instead := _stand_in(value)) is not None:
                self._instead.append((place, instead))
        self._look_at(value)
        return value

    def _look_at(self, value: Any) -> None:
        # The same, and some have one in another without an end.
        with suppress(Exception):
            self._look(value)

    def _look(self, value: Any) -> None:
        value = self._plain(value)
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            if not _is_library(value.__module__):
                self._functions.append(value)
        elif (back := _generator(value)) is not None:
            self.undo.append(back)
        elif isinstance(value, _HOLDERS):
            self.holders.append(value)
        elif isinstance(value, type):
            self._look_in(value)
        elif hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, torch.nn.Module)):
            self._look_into(value)

    def _plain(self, value: Any) -> Any:
        """The function that is called in the end."""
        if isinstance(value, functools.partial):
            return self._plain(value.func)
        if isinstance(value, MethodType):
            self._look_at(value.__self__)
            return value.__func__
        if isinstance(value, property):
            return value.fget
        if isinstance(value, (staticmethod, classmethod)):
            return self._plain(value.__func__)
        return value.__wrapped__ if isinstance(value, _CACHED) else value

    def _look_in(self, kind: type) -> None:
        """At what a class, and those that it is made from, hold themselves."""
        for it in kind.__mro__:
            if not _is_library(it.__module__):
                for name in [*vars(it)]:
                    if not name.startswith("__") or name == "__call__":
                        self._bound(_Place(it, name))

    def _look_into(self, instance: Any) -> None:
        if not _is_library(type(instance).__module__):
            self.holders.append(vars(instance))
            for name in [*vars(instance)]:
                self._bound(_Place(vars(instance), name))
            self._look_in(type(instance))


class _Drawn:
    """What a generator of torch's has drawn by now."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._state = generator, generator.get_state()

    def put_back(self) -> None:
        self._generator.set_state(self._state)


def names_in(code: CodeType) -> tuple[set[str], set[str]]:
    """Names that code reads or writes in its globals, and all that it names."""
    read, named = set[str](), {*code.co_names}
    for step in dis.get_instructions(code):
        if step.opname in _READ:
            read.add(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            of = names_in(inner)
            read, named = read | of[0], named | of[1]
    return read, named


def _is_library(name: str | None) -> bool:
    return (name or "builtins").partition(".")[0] in _LIBRARIES


def _stand_in(value: Any) -> Any:
    """What goes on as ``value`` would, and leaves it as it is; None where that is not needed."""
    if isinstance(value, staticmethod):
        instead = _stand_in(value.__func__)
        return None if instead is None else staticmethod(instead)
    if isinstance(value, _CACHED):
        return functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
    if isinstance(value, _ITERATORS):
        # Those of itertools say no more what they are made of from Python 3.14 on.
        with suppress(Exception), warnings.catch_warnings(action="ignore"):
            return _forked(value)
    return None


def _forked(value: Any) -> Any:
    """An iterator that goes on as another; a copy would share those that it is made from."""
    if isinstance(value, tuple):
        return tuple(_forked(it) for it in value)
    if isinstance(value, list):
        return [*value]
    if not isinstance(value, _ITERATORS):
        return value
    made: Any = value.__reduce__()
    make, of, *state = made
    instead = make(*(it if isinstance(it, (list, tuple)) else _forked(it) for it in of))
    if state and state[0] is not None:
        instead.__setstate__(_forked(state[0]))
    return instead


def _generator(value: Any) -> Undo | None:
    """What puts a generator of random numbers back; None for anything else."""
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, torch.Generator):
        return _Drawn(value).put_back
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    if isinstance(bits, np.random.BitGenerator):
        return functools.partial(setattr, bits, "state", bits.state)
    return None
