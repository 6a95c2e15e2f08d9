"""What was decided for a kind of call, and what of it is in force."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from belady.ir.plan import Section
from belady.measure.key import walk
from belady.planners.places import Sections


class Decided(NamedTuple):
    """What was decided for a kind of call.

    Attributes
    ----------
    sections
        None if it runs whole.
    flags
        Those of its modules that they were tried under.
    state_bytes
        What of an optimizer's state they leave room for.
    raced
        Whether they, or that there are none, were chosen by how long convolutions take.
    """

    sections: Sections
    flags: tuple[object, ...]
    state_bytes: int = 0
    raced: bool = False


class InForce(NamedTuple):
    """Sections that modules run in, and how to let them run whole."""

    sections: Sections
    undo: Callable[[], None]


WHOLE = InForce((), lambda: None)


class Related:
    """Whether two roots have modules in common: asked in every call, and looked up once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, one: nn.Module, other: nn.Module) -> bool:
        """Whether they do."""
        pair = id(one), id(other)
        if pair not in self._known:
            known = set(other.modules())
            self._known[pair] = any(it in known for it in one.modules())
        return self._known[pair]


def flags_of(model: nn.Module, sections: Sections) -> tuple[object, ...]:
    """Attributes of the modules in sections by which code goes one way or another."""
    tops = (model.get_submodule(name) for section in sections for name in section.modules)
    return tuple(
        value
        for module in walk(tops)
        for value in vars(module).values()
        if type(value) is bool or type(value) is str
    )


def sentence(section: Section) -> str:
    """What a user should know of a section."""
    run = "run" if len(section.ends) > 1 else "runs"
    return (
        f"{' to '.join(section.ends)} {run} in {section.slices} slices along the {section.whole}, "
        "since one op was over the budget, or would have been beside the workspace that it may "
        "ask for: results differ from plain PyTorch by the order of sums"
    )
