"""What the code of modules reaches outside of them: globals, closures, and what these hold.

A cache of tensors, a counter, a generator of random numbers or an iterator is found by the names
that forwards and hooks read, and by those of the functions that they name. What libraries hold is
left alone, and so is what was done once for all: a flag that says so, or a registry.
"""

from __future__ import annotations

import argparse
import dis
import functools
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from sys import stdlib_module_names
from types import (
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch

from belady.measure.changes import (
    CACHED,
    HOLDERS,
    MISSING,
    Undo,
    cache_undo,
    forked,
    generator_undo,
    has_dict,
    holder_undo,
    is_volatile,
)

_LIBRARIES = stdlib_module_names | {"torch", "torchvision", "numpy", "triton", "belady"}
_SPACES = (SimpleNamespace, argparse.Namespace, threading.local)
_READ = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
# Of more functions one is a library's whose name is not known here. What holds more is data, and no
# cache: of some what is inside is left alone, of others all.
_MOST, _MOST_ITEMS, _MOST_HELD = 1_000, 1_000, 100_000


@dataclass(frozen=True)
class _Place:
    """Where a name stands for something: in a dict, in a class, or in what functions share."""

    space: Any
    name: str = ""

    def get(self) -> Any:
        if type(self.space) is CellType:
            try:
                return self.space.cell_contents
            except ValueError:
                # It is empty until what it stands for is made.
                return MISSING
        space = self.space if isinstance(self.space, dict) else vars(self.space)
        return space.get(self.name, MISSING)

    def put(self, value: Any) -> None:
        """Have the name stand for a value, or for nothing, if it does not."""
        if self.get() is value:
            return
        if type(self.space) is CellType:
            if value is MISSING:
                del self.space.cell_contents
            else:
                self.space.cell_contents = value
        elif isinstance(self.space, dict):
            if value is MISSING:
                del self.space[self.name]
            else:
                self.space[self.name] = value
        elif value is MISSING:
            delattr(self.space, self.name)
        else:
            setattr(self.space, self.name, value)

    def put_back(self, value: Any) -> None:
        """The same, if what it stands for by now is not to stay."""
        now = self.get()
        if now is not value and is_volatile(now):
            self.put(value)


@dataclass
class Reached:
    """What was found.

    Attributes
    ----------
    undo
        Puts back what was changed since, each something else.
    instead
        Where iterators are, and others that go on as these would, to take their place meanwhile.
    """

    undo: list[Undo] = field(default_factory=list)
    instead: list[tuple[_Place, Any]] = field(default_factory=list)
    _functions: deque[FunctionType] = field(default_factory=deque)
    _seen: set[object] = field(default_factory=set)

    @classmethod
    def by(cls, module: torch.nn.Module) -> Reached:
        """By the methods and hooks of a module and of those inside it."""
        found, followed, parts = cls(), 0, [*module.modules()]
        for part in parts:
            found._look_at(type(part).forward)
        for part in parts:
            hooks = part._forward_pre_hooks, part._forward_hooks
            after = part._backward_pre_hooks, part._backward_hooks
            for held in (*hooks, *after):
                for hook in held.values():
                    found._look_at(hook)
            for name, it in vars(part).items():
                # Containers of its own are known.
                if not isinstance(it, (*HOLDERS, torch.Tensor, torch.nn.Module)):
                    found._bound(_Place(vars(part), name))
            found._look_in(type(part))
        while found._functions and followed < _MOST:
            found._follow(found._functions.popleft())
            followed += 1
        return found

    def _follow(self, function: FunctionType) -> None:
        read, named = names_in(function.__code__)
        space = function.__globals__
        for name in read:
            value = self._bound(_Place(space, name))
            if issubclass(type(value), ModuleType) and not _is_library(value.__name__):
                for inner in named:
                    if inner in vars(value):
                        self._bound(_Place(vars(value), inner))
        for cell in function.__closure__ or ():
            self._bound(_Place(cell))

    def _bound(self, place: _Place) -> Any:
        """Note what a name stands for, and give it."""
        value = place.get()
        if (known := (id(place.space), place.name)) in self._seen:
            return value
        self._seen.add(known)
        self.undo.append(functools.partial(place.put_back, value))
        instead = forked(value)
        if instead is not value:
            self.instead.append((place, instead))
        self._look_at(value)
        return value

    def _look_at(self, value: Any) -> None:
        # What is asked may answer with an error of its own, and some have one in another for ever.
        with suppress(Exception):
            self._look(self._plain(value))

    def _look(self, value: Any) -> None:
        kind = type(value)
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if issubclass(kind, FunctionType):
            if not _is_library(value.__module__):
                self._functions.append(value)
        elif issubclass(kind, CACHED):
            self.undo.append(cache_undo(value))
            self._look_at(value.__wrapped__)
        elif (back := generator_undo(value)) is not None:
            self.undo.append(back)
        elif issubclass(kind, HOLDERS):
            self._look_through(value)
        elif issubclass(kind, type):
            self._look_in(value)
        elif not issubclass(kind, (torch.Tensor, torch.nn.Module, ModuleType)):
            self._look_into(value)

    def _plain(self, value: Any) -> Any:
        """The function that is called in the end."""
        kind = type(value)
        if issubclass(kind, (functools.partial, functools.cached_property)):
            return self._plain(value.func)
        if issubclass(kind, MethodType):
            self._look_at(value.__self__)
            return value.__func__
        if issubclass(kind, property):
            return self._plain(value.fget)
        if issubclass(kind, (staticmethod, classmethod)):
            return self._plain(value.__func__)
        return value

    def _look_through(self, holder: Any) -> None:
        if len(holder) <= _MOST_HELD:
            self.undo.append(holder_undo(holder))
        if len(holder) <= _MOST_ITEMS:
            items = dict.values(holder) if isinstance(holder, dict) else holder
            for item in [*items]:
                if issubclass(type(item), (*HOLDERS, CACHED)):
                    self._look_at(item)

    def _look_in(self, kind: type) -> None:
        """At what a class, and those that it is made from, hold themselves."""
        for it in kind.__mro__:
            if not _is_library(it.__module__):
                for name in [*vars(it)]:
                    if not name.startswith("__") or name == "__call__":
                        self._bound(_Place(it, name))

    def _look_into(self, instance: Any) -> None:
        kind = type(instance)
        if issubclass(kind, _SPACES):
            held = vars(instance)
        elif has_dict(kind) and not _is_library(kind.__module__):
            # What stands for something else may make that when it is asked for its attributes.
            held = object.__getattribute__(instance, "__dict__")
        else:
            return
        for name in [*held]:
            self._bound(_Place(held, name))
        self.undo.append(holder_undo(held))
        self._look_in(kind)


def names_in(code: CodeType) -> tuple[list[str], list[str]]:
    """Names that code reads or writes in its globals, and all that it names; in order."""
    read = [step.argval for step in dis.get_instructions(code) if step.opname in _READ]
    named = [*code.co_names]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            of = names_in(inner)
            read, named = read + of[0], named + of[1]
    return _each(read), _each(named)


def _each(names: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(names)]


def _is_library(name: str | None) -> bool:
    return (name or "builtins").partition(".")[0] in _LIBRARIES
