"""What was decided for a kind of call, and what of it is in force."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from belady.measure.key import walk
from belady.planners.places import Sections


class Decided(NamedTuple):
    """Sections of a kind of call, none if it runs whole, and the flags they were tried under."""

    sections: Sections
    flags: tuple[object, ...]


class InForce(NamedTuple):
    """Sections that modules run in, and how to let them run whole."""

    sections: Sections
    undo: Callable[[], None]


WHOLE = InForce((), lambda: None)


def flags_of(model: nn.Module, sections: Sections) -> tuple[object, ...]:
    """Attributes of the modules in sections by which code goes one way or another."""
    tops = (model.get_submodule(name) for section in sections for name in section.modules)
    return tuple(
        value
        for module in walk(tops)
        for value in vars(module).values()
        if type(value) is bool or type(value) is str
    )
