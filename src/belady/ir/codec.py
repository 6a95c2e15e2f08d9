"""Between frozen dataclasses and what JSON can hold, driven by the types of their fields.

For each type an encoder and a decoder are built once. Both refuse what the other would not take,
so whatever is written can be read back as an equal document.

Documents hold some hundred thousand small objects; to call a decoder for each part of each takes
seconds. So lists are decoded by columns, one for each field of their items (`belady.ir.columns`).
What does not fit there is decoded item by item, which says where it is and what is wrong with it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from belady.ir import columns
from belady.ir.columns import Column
from belady.ir.scalars import PLAIN, PLAIN_MANY, Misfit, Repeated, refuse, show

LONGEST_LIST = 10**7

Tag = tuple[str, str]


class Codec(NamedTuple):
    """How to write a type and how to read it, one by one or many at once."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    many: Column


@cache
def codec(hint: Any) -> Codec:
    """Encoder and decoder of a field of type ``hint``."""
    if hint in PLAIN:
        return Codec(PLAIN[hint], PLAIN[hint], columns.plain(PLAIN_MANY[hint]))
    if get_origin(hint) is tuple:
        return _tuple_codec(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return _union_codec(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum_codec(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return object_codec(hint)
    raise TypeError(f"documents cannot hold {hint!r}")


def _enum_codec(kind: type[StrEnum]) -> Codec:
    members = {member.value: member for member in kind}
    wanted = "one of " + ", ".join(repr(name) for name in members)

    def encode(data: Any) -> Any:
        return data.value if type(data) is kind else refuse(wanted, data)

    def decode(data: Any) -> Any:
        if type(data) is not str or data not in members:
            refuse(wanted, data)
        return members[data]

    return Codec(encode, decode, columns.enum(members))


def _tuple_codec(hints: tuple[Any, ...]) -> Codec:
    if len(hints) == 2 and hints[1] is Ellipsis:
        item = codec(hints[0])
        many = columns.lists(item.many, LONGEST_LIST)
        return Codec(_many(tuple, item.encode, list), _many(list, item.decode, tuple, many), many)
    items = [codec(hint) for hint in hints]
    return Codec(
        _several(tuple, [item.encode for item in items], list),
        _several(list, [item.decode for item in items], tuple),
        columns.rows([item.many for item in items]),
    )


def _many(
    source: type[Any],
    convert: Callable[[Any], Any],
    target: Callable[..., Any],
    many: Column | None = None,
) -> Any:
    def run(data: Any) -> Any:
        if type(data) is not source:
            refuse("a list", data)
        if len(data) > LONGEST_LIST:
            raise Misfit(f"a list of {len(data)}, more than {LONGEST_LIST}")
        found = None if many is None else many([data])
        if found is not None:
            return found[0]
        result: list[Any] = []
        try:
            for item in data:
                result.append(convert(item))  # noqa: PERF401 (its length names the misfit)
        except Misfit as misfit:
            misfit.path.append(f"[{len(result)}]")
            raise
        return target(result)

    return run


def _several(source: type[Any], converts: list[Any], target: Callable[..., Any]) -> Any:
    def run(data: Any) -> Any:
        if type(data) is not source or len(data) != len(converts):
            refuse(f"a list of {len(converts)}", data)
        result: list[Any] = []
        try:
            for convert, item in zip(converts, data, strict=True):
                result.append(convert(item))
        except Misfit as misfit:
            misfit.path.append(f"[{len(result)}]")
            raise
        return target(result)

    return run


def _union_codec(hints: tuple[Any, ...]) -> Codec:
    kinds = [hint for hint in hints if hint is not type(None)]
    if len(kinds) == 1:
        return _optional_codec(codec(kinds[0]))
    if len(kinds) < len(hints) or not all(is_dataclass(kind) for kind in kinds):
        raise TypeError(f"documents cannot hold a union of {hints!r}")
    by_name = {kind.__name__: object_codec(kind, ("kind", kind.__name__)) for kind in kinds}
    by_type = {kind: by_name[kind.__name__] for kind in kinds}
    wanted = "an object whose 'kind' is one of " + ", ".join(by_name)

    def encode(data: Any) -> Any:
        found = by_type.get(type(data))
        return found.encode(data) if found else refuse(wanted, data)

    def decode(data: Any) -> Any:
        name = data.get("kind") if isinstance(data, dict) else None
        if type(name) is not str or name not in by_name:
            refuse(wanted, data if name is None else name)
        return by_name[name].decode(data)

    many = columns.union({name: found.many for name, found in by_name.items()})
    return Codec(encode, decode, many)


def _optional_codec(inner: Codec) -> Codec:
    return Codec(
        lambda data: None if data is None else inner.encode(data),
        lambda data: None if data is None else inner.decode(data),
        columns.optional(inner.many),
    )


@cache
def object_codec(kind: type[Any], tag: Tag | None = None) -> Codec:
    """Encoder and decoder of a dataclass, with ``tag`` as one more key and its fixed value."""
    hints = get_type_hints(kind)
    declared = fields(kind)
    if any(item.kw_only or not item.init or (tag and tag[0] == item.name) for item in declared):
        raise TypeError(f"{kind.__name__} has a field that documents cannot hold")
    parts = [(item.name, codec(hints[item.name])) for item in declared]
    fixed = _fixed(declared, tag)
    return Codec(
        _object_encoder(kind, parts, fixed),
        _object_decoder(kind, parts, fixed),
        columns.objects(kind, {name: part.many for name, part in parts}, fixed),
    )


def _fixed(declared: tuple[Field[Any], ...], tag: Tag | None) -> dict[str, Any]:
    """Keys whose value is prescribed; they are written first."""
    constants = {item.name: item.metadata["const"] for item in declared if "const" in item.metadata}
    return dict([tag] if tag else []) | constants


def _object_encoder(
    kind: type[Any], parts: list[tuple[str, Codec]], fixed: dict[str, Any]
) -> Callable[[Any], Any]:
    names = [name for name, _ in parts]
    encoders = [(name, part.encode) for name, part in parts]
    values_of = attrgetter(*names) if len(names) > 1 else None

    def encode(data: Any) -> Any:
        if type(data) is not kind:
            refuse(f"a {kind.__name__}", type(data).__name__)
        values = values_of(data) if values_of else [getattr(data, name) for name in names]
        result = dict(fixed)
        for (name, convert), value in zip(encoders, values, strict=True):
            try:
                result[name] = convert(value)
            except Misfit as misfit:
                misfit.path.append(f".{name}")
                raise
        _check_fixed(result, fixed)
        return result

    return encode


def _object_decoder(
    kind: type[Any], parts: list[tuple[str, Codec]], fixed: dict[str, Any]
) -> Callable[[Any], Any]:
    decoders = [(name, part.decode) for name, part in parts]
    keys = {*fixed, *(name for name, _ in parts)}

    def decode(data: Any) -> Any:
        if type(data) is not dict or data.keys() != keys:
            _wrong_keys(data, keys, fixed)
        if fixed:
            _check_fixed(data, fixed)
        result: list[Any] = []
        try:
            for name, convert in decoders:
                result.append(convert(data[name]))
        except Misfit as misfit:
            misfit.path.append(f".{decoders[len(result)][0]}")
            raise
        return kind(*result)

    return decode


def _check_fixed(data: dict[str, Any], fixed: dict[str, Any]) -> None:
    for name, wanted in fixed.items():
        if name in data and (type(data[name]), data[name]) != (type(wanted), wanted):
            misfit = Misfit(f"this is {show(data[name])}, only {wanted!r} can be read here")
            misfit.path.append(f".{name}")
            raise misfit


def _wrong_keys(data: Any, keys: set[str], fixed: dict[str, Any]) -> NoReturn:
    if isinstance(data, Repeated):
        raise Misfit(f"the key {show(data.repeated)} appears twice")
    if not isinstance(data, dict):
        refuse("an object", data)
    # A document of another version has other keys, but that is not what is wrong with it.
    _check_fixed(data, fixed)
    for name in sorted(keys - data.keys()):
        raise Misfit(f"the key {name!r} is missing")
    raise Misfit(f"unknown key {show(min(data.keys() - keys))}")
