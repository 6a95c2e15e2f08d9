"""How what a program holds is put back as it was; nothing of it calls a program's own methods.

What is put back is what a call without bytes leaves and a real one would not: tensors without
bytes, and numbers, which count calls. Other things stay: somebody may have done something once, and
said so.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

Undo = Callable[[], None]
MISSING: Any = object()
HOLDERS: tuple[type[Any], ...] = (dict, list, set, deque)
CACHED: Any = type(functools.lru_cache(len))

_STARTED: tuple[Iterator[Any], ...] = (iter([]), iter(()), iter(""), iter(b""), iter(range(0)))
# What can be forked where it stands. A generator cannot.
_ITERATORS = (
    *(it for it in vars(itertools).values() if isinstance(it, type) and hasattr(it, "__next__")),
    *map(type, _STARTED),
    type(iter(dict[str, int]())),
    type(iter(set[int]())),
)
# How far tensors without bytes are looked for, and in how many items.
_DEPTH, _ITEMS = 3, 1_000


def is_volatile(value: Any) -> bool:
    """Whether a value that came to be in a call without bytes is not to stay."""
    return _is_number(value) or holds_fakes(value)


def holds_fakes(value: Any, depth: int = _DEPTH) -> bool:
    """Whether there is a tensor without bytes in it."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return issubclass(kind, FakeTensor)
    if not depth:
        return False
    if issubclass(kind, dict):
        items: Any = dict.values(value)
    elif issubclass(kind, (list, tuple, set, frozenset, deque)):
        items = value
    elif kind.__module__ != "builtins" and has_dict(kind):
        held = object.__getattribute__(value, "__dict__")
        items = held.values() if isinstance(held, dict) else ()
    else:
        return False
    return any(holds_fakes(it, depth - 1) for it in itertools.islice([*items], _ITEMS))


def has_dict(kind: type) -> bool:
    """Whether what is of that class has attributes of its own, in a dict."""
    return kind.__dictoffset__ != 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, complex)


def holder_undo(holder: Any) -> Undo:
    """What puts back the items of a dict, a list, a set or a deque, be it of a class of its own."""
    if isinstance(holder, dict):
        # One that knows the order of its names forgets it when it is asked as a dict.
        base: Any = OrderedDict if isinstance(holder, OrderedDict) else dict
        return functools.partial(_dict_back, base, holder, dict(base.items(holder)))
    if isinstance(holder, set):
        return functools.partial(_set_back, holder, set(set.__iter__(holder)))
    of: Any = list if isinstance(holder, list) else deque
    return functools.partial(_row_back, of, holder, [*of.__iter__(holder)])


def _dict_back(base: Any, holder: Any, before: dict[Any, Any]) -> None:
    for name, now in [*base.items(holder)]:
        was = before.get(name, MISSING)
        if now is not was and is_volatile(now):
            if was is MISSING:
                base.__delitem__(holder, name)
            else:
                base.__setitem__(holder, name, was)


def _set_back(holder: Any, before: set[Any]) -> None:
    for it in [*set.__iter__(holder)]:
        if it not in before and is_volatile(it):
            set.discard(holder, it)


def _row_back(of: Any, holder: Any, before: list[Any]) -> None:
    now = [*of.__iter__(holder)]
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    known = {*map(id, before)}
    if any(id(it) not in known and holds_fakes(it) for it in now):
        # Others may have gone for it, as where no more are kept than so many.
        of.clear(holder)
        of.extend(holder, before)
    elif len(now) == len(before):
        for place, (it, was) in enumerate(zip(now, before, strict=True)):
            if it is not was and _is_number(it):
                of.__setitem__(holder, place, was)
    else:
        while len(holder) > len(before) and _is_number(of.__getitem__(holder, -1)):
            of.pop(holder)


def cache_undo(cached: Any) -> Undo:
    """What empties the cache of a function, if there are tensors without bytes in it."""

    def put_back() -> None:
        # What it says that it holds are its results, or a dict of them.
        if any(map(holds_fakes, gc.get_referents(cached))):
            cached.cache_clear()

    return put_back


def forked(value: Any) -> Any:
    """An iterator that goes on as ``value`` would; the value itself, if that cannot be had."""
    if type(value) in _ITERATORS:
        # Those of itertools say no more what they are made of from Python 3.14 on.
        with suppress(Exception), warnings.catch_warnings(action="ignore"):
            return _forked(value)
    return value


def _forked(value: Any) -> Any:
    """A copy would share those that it is made from."""
    if isinstance(value, tuple):
        return tuple(_forked(it) for it in value)
    if isinstance(value, list):
        return [*value]
    if type(value) not in _ITERATORS:
        return value
    made: Any = value.__reduce__()
    make, of, *state = made
    instead = make(*(it if isinstance(it, (list, tuple)) else _forked(it) for it in of))
    if state and state[0] is not None:
        instead.__setstate__(_forked(state[0]))
    return instead


def generator_undo(value: Any) -> Undo | None:
    """What puts a generator of random numbers back; None for anything else."""
    kind = type(value)
    if issubclass(kind, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if issubclass(kind, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if issubclass(kind, torch.Generator):
        return _Drawn(value).put_back
    bits = value.bit_generator if issubclass(kind, np.random.Generator) else value
    if issubclass(type(bits), np.random.BitGenerator):
        return functools.partial(setattr, bits, "state", bits.state)
    return None


class _Drawn:
    """What a generator of torch's has drawn by now."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._state = generator, generator.get_state()

    def put_back(self) -> None:
        self._generator.set_state(self._state)
