"""What a user can ask about: a value by its id, modules by path or pattern."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from belady.ir.trace import Save, Trace
from belady.units import printable

_NEAR = 5
# An id beyond this many digits is no id of any trace, and may be too long for `int`.
_MOST_DIGITS = 18


class UnknownSubjectError(LookupError):
    """Nothing in the run is called so; the message names what comes near."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What was found.

    Attributes
    ----------
    values
        Largest first.
    modules
        Paths that match and save something, in the order in which they do; None where a value was
        asked about, or nothing in particular.
    """

    values: tuple[int, ...]
    modules: tuple[str, ...] | None = None


def find(trace: Trace, what: str) -> Subject:
    """The value whose id is ``what``, or what the modules save that it names.

    A path stands for the modules below it too; ``*``, ``?`` and ``[...]`` are those of a shell. A
    number is a value, so a module that is called ``3`` is ``[3]``.

    Raises
    ------
    UnknownSubjectError
        If nothing is called so.
    """
    if is_value(what):
        if len(what) > _MOST_DIGITS or int(what) >= len(trace.values):
            raise UnknownSubjectError(_no_such_value(trace, what))
        return Subject((int(what),))
    known = modules(trace)
    matched = {module for module in known if _matches(module, what)}
    if not matched:
        raise UnknownSubjectError(_no_such_module(known, what))
    values = {index for index, save in _saves(trace) if save.module in matched}
    found = by_size(trace, values)
    saves = sorted((save for _, save in _saves(trace)), key=lambda save: save.op)
    return Subject(found, tuple(dict.fromkeys(s.module for s in saves if s.module in matched)))


def modules(trace: Trace) -> set[str]:
    """Paths of all modules that run an op or save a value."""
    return {op.module for op in trace.ops} | {save.module for _, save in _saves(trace)}


def is_value(what: str) -> bool:
    """Whether ``what`` is read as the id of a value."""
    return what.isascii() and what.isdigit()


def by_size(trace: Trace, values: set[int] | tuple[int, ...]) -> tuple[int, ...]:
    """Largest first; of equals the smaller id."""
    return tuple(sorted(values, key=lambda v: (-trace.storages[trace.values[v].storage].nbytes, v)))


def _saves(trace: Trace) -> Iterator[tuple[int, Save]]:
    for index in trace.saved:
        for save in trace.values[index].saves:
            yield index, save


def _matches(module: str, what: str) -> bool:
    if module == what or module.startswith(f"{what}."):
        return True
    return fnmatchcase(module, what) or fnmatchcase(module, f"{what}.*")


def _no_such_value(trace: Trace, what: str) -> str:
    if not trace.saved:
        return f"there is no value {what[:_MOST_DIGITS]}: this run saves none"
    wanted = int(what[:_MOST_DIGITS])
    near = sorted(sorted(trace.saved, key=lambda index: abs(index - wanted))[:_NEAR])
    return (
        f"there is no value {what[:_MOST_DIGITS]}: their ids end at {len(trace.values) - 1}; the "
        f"nearest that are saved are {', '.join(map(str, near))}"
    )


def _no_such_module(known: set[str], what: str) -> str:
    named = sorted({path for name in known if name for path in _with_parents(name)})
    inside = [name for name in named if what and what.lower() in name.lower()]
    # Without the signs of a pattern, which no name has.
    bare = what.strip("*?.[]")
    close = get_close_matches(bare, named, _NEAR, 0.5)
    near = list(dict.fromkeys([*close, *inside]))[:_NEAR]
    hint = f"did you mean {', '.join(near)}?" if near else _some(named)
    return printable(f"no module is called {what!r} or below it: {hint}")


def _with_parents(module: str) -> Iterator[str]:
    """``a.b.c`` and what it lies in: ``a.b``, ``a``."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _some(named: list[str]) -> str:
    if not named:
        return "this run names no modules"
    more = ", ..." if len(named) > _NEAR else ""
    return f"there are {', '.join(named[:_NEAR])}{more}"
