"""Decoding many items of one type at once.

A column gives what a list decodes to, or None where one by one may tell otherwise. It never takes
what the decoder of an item refuses. Loops over items are those of Python's own functions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import chain, islice, repeat
from operator import itemgetter
from types import MemberDescriptorType
from typing import Any

Column = Callable[[list[Any]], list[Any] | None]


def plain(certain: Callable[[list[Any]], bool]) -> Column:
    """Column of what stays as it is."""
    return lambda column: column if certain(column) else None


def enum(members: Mapping[str, Any]) -> Column:
    """Column of members by their names."""

    def many(column: list[Any]) -> list[Any] | None:
        try:
            return list(map(members.__getitem__, column))
        except (KeyError, TypeError):
            return None

    return many


def lists(item: Column, longest: int) -> Column:
    """Column of lists of any length, whose items are a column together."""

    def many(column: list[Any]) -> list[Any] | None:
        if not _all_are(list, column):
            return None
        lengths = list(map(len, column))
        if max(lengths, default=0) > longest:
            return None
        found = item(list(chain.from_iterable(column)))
        if found is None:
            return None
        rest = iter(found)
        return [tuple(islice(rest, length)) for length in lengths]

    return many


def rows(items: list[Column]) -> Column:
    """Column of lists that have one item of each kind."""

    def many(column: list[Any]) -> list[Any] | None:
        if not _all_are(list, column) or not set(map(len, column)) <= {len(items)}:
            return None
        made: list[list[Any]] = []
        for at, item in enumerate(items):
            decoded = item(list(map(itemgetter(at), column)))
            if decoded is None:
                return None
            made.append(decoded)
        return list(zip(*made, strict=True)) if made else [() for _ in column]

    return many


def optional(inner: Column) -> Column:
    """Column of what may be None."""

    def many(column: list[Any]) -> list[Any] | None:
        found = inner([item for item in column if item is not None])
        if found is None:
            return None
        rest = iter(found)
        return [None if item is None else next(rest) for item in column]

    return many


def union(kinds: Mapping[str, Column]) -> Column:
    """Column of objects, each with its kind."""

    def many(column: list[Any]) -> list[Any] | None:
        if not _all_are(dict, column):
            return None
        rest = {}
        for name, kind in kinds.items():
            found = kind([item for item in column if item.get("kind") == name])
            if found is None:
                return None
            rest[name] = iter(found)
        try:
            return [next(rest[item["kind"]]) for item in column]
        except (KeyError, TypeError):
            return None

    return many


def objects(kind: type[Any], parts: Mapping[str, Column], fixed: Mapping[str, Any]) -> Column:
    """Column of objects, a column for each of their fields."""
    keys = len({*parts, *fixed})
    make = _maker(kind, tuple(parts))

    def many(column: list[Any]) -> list[Any] | None:
        if not _all_are(dict, column) or not set(map(len, column)) <= {keys}:
            return None
        made: list[Any] = []
        try:
            for name, wanted in fixed.items():
                found = list(map(itemgetter(name), column))
                if not _all_are(type(wanted), found) or not set(found) <= {wanted}:
                    return None
            for name, part in parts.items():
                decoded = part(list(map(itemgetter(name), column)))
                if decoded is None:
                    return None
                made.append(decoded)
        except KeyError:
            return None
        return make(made, len(column))

    return many


def _maker(kind: type[Any], names: tuple[str, ...]) -> Callable[[list[list[Any]], int], list[Any]]:
    """What makes as many objects as are asked for of a column for each field."""
    slots = [vars(kind).get(name) for name in names]
    slotted = all(isinstance(slot, MemberDescriptorType) for slot in slots)
    if hasattr(kind, "__post_init__") or not slotted:
        return lambda made, _: list(map(kind, *made))

    def make(made: list[list[Any]], count: int) -> list[Any]:
        # The constructor of a frozen dataclass takes longer than all else that is done here.
        found = list(map(object.__new__, repeat(kind, count)))
        for slot, column in zip(slots, made, strict=True):
            deque(map(slot.__set__, found, column), maxlen=0)
        return found

    return make


def _all_are(kind: type[Any], column: list[Any]) -> bool:
    return set(map(type, column)) <= {kind}
