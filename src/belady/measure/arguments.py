"""The arguments of a call, so that they can be compared with those of another."""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch


def numbers_of(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    """Arguments flattened: what is no tensor by kind and value, parameters by identity.

    None where one is of a kind that cannot be compared.
    """
    found: list[Any] = []
    comparable = _flatten(args, found)
    for name, arg in kwargs.items():
        found.append(name)
        comparable = _flatten((arg,), found) and comparable
    return found if comparable else None


class _Row(NamedTuple):
    """A sequence; ``item`` is itself where it cannot change, and else no argument."""

    kind: type
    items: tuple[Any, ...]
    item: Any


def alike_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Objects that cannot change, `torch.Tensor` for a tensor, a weak reference for a parameter.

    None where an argument is anything else.
    """
    return _alike((*args, *kwargs, *kwargs.values()))


def _alike(items: Iterable[Any]) -> tuple[Any, ...] | None:
    found: list[Any] = []
    for item in items:
        if type(item) is torch.Tensor:
            found.append(torch.Tensor)
        elif isinstance(item, torch.nn.Parameter):
            found.append(weakref.ref(item))
        elif type(item) in _LASTING:
            found.append(item)
        elif type(item) in _ROWS and (within := _alike(item)) is not None:
            lasting = type(item) is not list and all(type(it) in _LASTING for it in item)
            found.append(_Row(type(item), within, item if lasting else _NOBODY))
        else:
            return None
    return tuple(found)


def is_alike(alike: tuple[Any, ...], given: Sequence[Any]) -> bool:
    """Whether a call with ``given`` certainly has the numbers of the one ``alike`` was made of."""
    if len(given) != len(alike):
        return False
    for item, known in zip(given, alike, strict=False):  # strict costs, and lengths are equal
        if item is known or type(item) is known:
            continue
        kind = type(known)
        if kind is _Row:
            if item is not known.item and not (
                type(item) is known.kind and is_alike(known.items, item)
            ):
                return False
        elif kind is weakref.ReferenceType:
            if item is None or known() is not item:
                return False
        elif type(item) is not kind or kind not in _BY_VALUE or item != known or not item:
            return False
    return True


def _flatten(items: Iterable[Any], into: list[Any]) -> bool:
    """Append what ``items`` are; whether all of them can be compared."""
    comparable = True
    for item in items:
        kind = type(item)
        into.append(kind)
        if kind is torch.Tensor:
            continue
        if kind in _PLAIN or isinstance(item, _NUMBERS):
            into.append(item)
            if isinstance(item, _WITH_SIGN):
                into.append(repr(item))  # 0 equals -0
        elif isinstance(item, torch.nn.Parameter):
            into.append(id(item))
        elif isinstance(item, (tuple, list)):
            into.append(len(item))
            comparable = _flatten(item, into) and comparable
        elif kind is slice:
            comparable = _flatten((item.start, item.stop, item.step), into) and comparable
        elif not isinstance(item, torch.Tensor):
            comparable = False
    return comparable


_LASTING = frozenset(
    {
        *(int, float, bool, str, complex, type(None), type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_NOBODY = object()
_ROWS = (tuple, list, torch.Size)
# What is equal and not zero has one sign, and NaN equals nothing.
_BY_VALUE = (int, float, str)
_PLAIN = _LASTING | {type, types.FunctionType}
_NUMBERS = (np.generic, enum.Enum)
_WITH_SIGN = (float, complex, np.inexact)
